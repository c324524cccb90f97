"""Writes the tables of docs/conformance.md from the records.

  python tests/conformance/report.py

A record is what `pytest tests/conformance --attend=... --record=FILE` writes.
"""

import collections
import json
import math
import pathlib

import cases

ROOT = pathlib.Path(__file__).parent / ".." / ".."
RECORDS = ROOT / "results" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
MARKS = "<!-- begin tables -->", "<!-- end tables -->"
VERDICTS = ("pass", "refused", "raises", "wrong", "not run")


def read_records():
  """Returns the records in the order of the tables."""
  records = []
  for file in RECORDS.glob("*.json"):
    records.append(json.loads(file.read_text("utf-8")))
  return sorted(records, key=place)


def place(record):
  """Returns a key that sorts ours first, and then by adapter."""
  return "relpos_jax" not in record["versions"], record["attend"]


def table(header, rows):
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def adapter(record):
  """Returns the name of a record's adapter, as in the command."""
  return f"`{record['attend'].removeprefix('adapters.')}`"


def implementations(records):
  """Returns the table of implementations: versions, date and number of verdicts."""
  rows = []
  for record in records:
    versions = ", ".join(f"{name} {x}" for name, x in record["versions"].items())
    counts = collections.Counter()
    for case in cases.CASES:
      counts[verdict(record, case)] += 1
    numbers = [str(counts[name]) for name in VERDICTS]
    rows.append([adapter(record), versions, record["date"], *numbers])
  return table(["adapter", "versions", "date", *VERDICTS], rows)


def verdict(record, case):
  """Returns a verdict in a word; "not run" if the record is older than the case."""
  result = record["cases"].get(case.name)
  return result["verdict"] if result else "not run"


def exceptions(records):
  """Returns the table of all that is wrong or raises."""
  rows = []
  for record in records:
    for case in cases.CASES:
      if verdict(record, case) in ("raises", "wrong"):
        result = describe(record["cases"][case.name])
        rows.append([adapter(record), case.name, result])
  return table(["adapter", "case", "result"], rows)


def describe(result):
  """Says what is wrong, or which error is raised."""
  if result["verdict"] == "raises":
    return result["how"].replace("|", "\\|")[:90].rstrip()
  if math.isinf(result["error"]):
    return "not finite"
  return f"wrong by {result['error']:.1g}"


def passes(records):
  """Returns the table of cases, with the adapters that pass each of them."""
  rows = []
  for case in cases.CASES:
    passing = []
    for record in records:
      if verdict(record, case) == "pass":
        passing.append(adapter(record))
    rows.append([case.name, case.source, ", ".join(passing)])
  return table(["case", "source", "passed by"], rows)


def tables():
  """Returns all that stands between the page's marks."""
  records = read_records()
  sections = [
    implementations(records),
    "### All that is wrong or raises",
    exceptions(records),
    "### Every case",
    passes(records),
  ]
  return "\n\n".join(sections)


def write_page():
  """Rewrites what is between the page's marks."""
  before, rest = PAGE.read_text("utf-8").split(MARKS[0])
  after = rest.split(MARKS[1])[1]
  text = "\n\n".join([MARKS[0], tables(), MARKS[1]])
  PAGE.write_text(before + text + after, "utf-8")


if __name__ == "__main__":
  write_page()
