"""Writes the tables of docs/conformance.md from the records.

  python tests/conformance/report.py

A record is what `pytest tests/conformance --attend=... --record=FILE` writes.
"""

import json
import pathlib

import cases

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "results" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
MARKS = "<!-- begin tables -->", "<!-- end tables -->"
FOLDER = "tests/conformance"
TEST = "test_conformance.py::test_attention"
NOT_RUN = {"verdict": "not run"}  # the record is older than the case
VERDICTS = ("pass", "refused", "raises", "wrong")


def read_records():
  """Returns the records, ours first and then by name."""
  records = []
  for file in RECORDS.glob("*.json"):
    records.append({"name": file.stem, **json.loads(file.read_text("utf-8"))})
  return sorted(records, key=is_ours_then_name)


def is_ours_then_name(record):
  return "relpos_jax" not in record["versions"], record["name"]


def table(header, rows):
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def implementations(records):
  """Returns the table of implementations: versions, date and number of verdicts."""
  rows = []
  for number, record in enumerate(records, 1):
    versions = ", ".join(f"{name} {x}" for name, x in record["versions"].items())
    verdicts = [case["verdict"] for case in record["cases"].values()]
    counts = [str(verdicts.count(verdict)) for verdict in VERDICTS]
    name = f"`{record['attend'].removeprefix('adapters.')}`"
    rows.append([str(number), name, versions, record["date"], *counts])
  return table(["", "adapter", "versions", "date", *VERDICTS], rows)


def cell(case):
  """Returns a verdict in a word; of what is wrong, the error."""
  match case["verdict"]:
    case "wrong":
      return f"**{case['error']:.0e}**"
    case "refused":
      return "-"
    case verdict:
      return verdict


def matrix(records):
  """Returns the table of all cells, a row for each case."""
  rows = []
  for case in cases.CASES:
    cells = []
    for record in records:
      cells.append(cell(record["cases"].get(case.name, NOT_RUN)))
    rows.append([case.name, *cells])
  return table(["case", *map(str, range(1, len(records) + 1))], rows)


def exceptions(records):
  """Returns the table of all that is wrong or raises, with what shows it."""
  symptoms = {case.name: case.symptom for case in cases.CASES}
  rows = []
  for number, record in enumerate(records, 1):
    for name, case in record["cases"].items():
      if case["verdict"] == "raises":
        found = case["how"].replace("|", "\\|")[:90]
      elif case["verdict"] == "wrong":
        found = f"wrong by {case['error']:.1g}: {symptoms.get(name, name)}?"
        found = found.replace("wrong by inf", "not finite")
      else:
        continue
      arguments = f"`'{TEST}[{name}]' --attend={record['attend']}`"
      rows.append([str(number), found, arguments])
  return table(["", "found", f"`cd {FOLDER}; pytest` ..."], rows)


def tables():
  """Returns all that stands between the page's marks."""
  records = read_records()
  sections = [
    implementations(records),
    "### All that is wrong or raises",
    exceptions(records),
    "### Every case",
    "A dash: refused. A number: wrong, by so much of the largest number, or of one.",
    matrix(records),
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
