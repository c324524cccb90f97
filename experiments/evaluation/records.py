"""Reads and writes records of finished runs, from which tables and curves are made.

A record is a line of JSON with these values:

- sweep, row, seed: the sweep, its configuration and the seed. For a single run, the
  sweep is "", and the row is the name of its config
- recipe: `RECIPE` of the code that trained it; 1 if absent
- digest: identifies `config` and `recipe`
- config: values that differ from configs/default.py, by dotted key, and the task unless
  it is translation
- commit, date: the commit of the code, and the time of the last start that trained
- hardware, packages: a description of the machine, and versions by name
- budget: updates, tokens_per_update, minutes from the first update to the end, pauses
  included, and tokens_per_second
- checkpoints: steps of the checkpoints that were averaged for scoring; old records have
  none
- scores: by split; the first one is the main score of the task. Translation has
  sacrebleu, paper_bleu, chrf, exact and signatures; old records lack chrf and exact
- sentences: rows of numbers by split, described below
- curve: rows of step, validation loss and validation score; the score may be null
- exact: only in translation, by split: rows of a step and the exact matches (%) in a
  sample of the split. The splits are valid and, with `training.score_tests`, the test
  sets; their samples are longer than `batches.max_length`, if possible. Old records
  have none

Each row of `sentences` stands for an example, or for a batch:

- translation: the length, and the columns of `bleu.sentence_statistics`; old records
  lack the last column. The length is that of the longer of source and reference, in
  tokens without EOS
- graphs: the size (nodes, or relations of a chain), and 1 if the class is right
- music: the number of tokens in a piece, and its nats, including its end token
- length tasks: the length of a batch's inputs, and the share of right answers

The rows determine BLEU and exact matches of any selection of sentences, for example by
the length of the reference. A record holds no text of the data.
"""

import hashlib
import json
import lzma
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.errors import InputError
from experiments.files import read_content, replace_file

# The version of the computation. Raise it when a change of the code alters the numbers
# of a run. Version 1 had other dropout masks and another rule to end beam search.
RECIPE = 2
# Keys that do not affect a digest: the config's name, and folders of data with verified
# checksums: add the path of a source that `data.upstream.Upstream` verifies.
_UNVERSIONED = (
  "name",
  "data.multi30k.path",
  "data.scan.path",
  "data.clutrr.path",
  "data.chorales.path",
)
_VERIFIED_GRAPHS = ("MUTAG", "Mutagenicity")  # names in `data.tu`; default first
_TYPES = {"row": str, "seed": int, "digest": str, "config": dict}
Record = Mapping[str, Any]
# The records of a sweep by configuration, in the order of seeds.
Records = Mapping[str, Sequence[Record]]


def digest(changes: Mapping[str, Any], recipe: int = RECIPE) -> str:
  """Identifies a config by 12 hex digits of a SHA-256.

  `changes` are the values that differ from the defaults. So a new key does not alter
  the digest of old records, if its default means the old behaviour. The config's name,
  the order of keys, and folders of data with verified checksums have no effect.

  >>> digest({"seed": 1, "model.rate": 0}) == digest({"model.rate": 0.0, "seed": 1})
  True
  """
  values = without_folders(changes)
  for key, value in values.items():
    if type(value) is int:
      values[key] = float(value)  # 0 and 0.0 are the same value
  if recipe > 1:
    values["recipe"] = recipe
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def without_folders(changes: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values of a config without its name and without folders of data.

  Only folders of data with verified checksums are dropped: the data are the same in any
  folder, so digests must not depend on it.
  """
  values = dict(changes)
  for key in _UNVERSIONED:
    values.pop(key, None)
  if values.get("data.tu.name", _VERIFIED_GRAPHS[0]) in _VERIFIED_GRAPHS:
    values.pop("data.tu.path", None)
  return values


def hardware(environment: Mapping[str, Any]) -> str:
  """Describes the machine of a run from its environment.json."""
  return "{devices}, {cpu_cores} cores of {cpu}".format_map(environment)


def to_line(record: Mapping[str, Any]) -> str:
  """Formats a record as a line of a results file."""
  return json.dumps(record, separators=(",", ":")) + "\n"


def write_records(path: pathlib.Path, records: Iterable[Record]) -> None:
  """Writes a results file atomically; compresses it if its name ends in .xz."""
  lines = "".join(map(to_line, records)).encode()
  with replace_file(path) as file:
    file.write(lzma.compress(lines) if path.suffix == ".xz" else lines)


def runs_folder(results: pathlib.Path) -> pathlib.Path:
  """Returns RESULTS/runs, the folder of the records, for a folder RESULTS.

  Raises InputError if the argument is itself a folder of records.
  """
  if results.name == "runs":
    remedy = f"give --results={results.parent}: records are in its folder runs"
    raise InputError(f"--results={results}: {remedy}")
  return results / "runs"


def record_files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Finds NAME.jsonl and NAME.jsonl.xz in a folder; returns these files by NAME."""
  files = [*folder.glob("*.jsonl.xz"), *folder.glob("*.jsonl")]
  return {file.name.partition(".jsonl")[0]: file for file in files}


def read_records(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the records of a results file, one a line; returns [] if it is missing.

  Raises InputError if a line is not a record.
  """
  if not path.exists():
    return []
  records = []
  for number, line in enumerate(read_content(path).splitlines(), start=1):
    try:
      record = json.loads(line)
      is_record = all(type(record[name]) is kind for name, kind in _TYPES.items())
    except (LookupError, TypeError, ValueError):
      is_record = False
    if not is_record:
      problem = f"{path}, line {number}: half-written or no record"
      raise InputError(f"{problem}: restore or delete that line")
    records.append(record)
  return records


def index_records(
  path: pathlib.Path, records: Iterable[Record]
) -> dict[tuple[str, int], Record]:
  """Returns the records of a results file by configuration and seed.

  Raises InputError, which names `path`, if two records have the same configuration and
  seed.
  """
  indexed = {}
  for number, record in enumerate(records, start=1):
    configuration, seed = key = record["row"], record["seed"]
    if key in indexed:
      problem = f"a second record of {configuration!r}, seed {seed}"
      raise InputError(f"{path}, line {number}: {problem}: delete one of them")
    indexed[key] = record
  return indexed


def group_records(path: pathlib.Path, records: Sequence[Record]) -> Records:
  """Groups the records of a results file by configuration, in the order of seeds.

  Raises InputError if two records have the same configuration and seed, or if they do
  not belong in one table.
  """
  indexed = index_records(path, records)
  firsts = {}  # by what is shared: the line of its first record, and the value there
  for number, record in enumerate(records, start=1):
    for key, value in _collect_shared(record).items():
      first, expected = firsts.setdefault(key, (number, value))
      if value != expected:
        problem = f"not the same {key[0]} as line {first}, so not in one table"
        raise InputError(f"{path}, line {number}: {problem}: delete one of them")
  grouped = {configuration: [] for configuration, _ in indexed}
  for configuration, seed in sorted(indexed, key=lambda key: key[1]):
    grouped[configuration].append(indexed[configuration, seed])
  return grouped


def _collect_shared(record: Record) -> dict[tuple, Any]:
  """Collects the values that a record must share with other records of its table.

  A key names what is shared, such as "budget", and may add a configuration, seed or
  split. If two records have the same key, they must have the same value.
  """
  budget, config, seed = record["budget"], dict(record["config"]), record["seed"]
  config.pop("seed", None)
  if config.get("data.source") != "tu":
    seed = None  # seeds of `tu` are folds, each with data of its own
  lengths = {}
  for split, sentences in record["sentences"].items():
    lengths[split] = [sentence[0] for sentence in sentences]
  shared = {
    ("recipe",): record.get("recipe", 1),
    ("budget", seed): (budget["updates"], budget["tokens_per_update"]),
    ("config", record["row"]): config,
    ("data", seed): lengths,
  }
  for split, scores in record["scores"].items():
    for name, signature in scores.get("signatures", {}).items():
      shared["signatures", split, name] = signature
  return shared
