"""The record of a finished run: one line of JSON, from which all tables and curves are made.

A record is a dict of

  sweep, row, seed    which cell of which sweep it is; a run of its own has no sweep, "", and its
                      config's name for a row
  digest              of `config`: what was run
  config              the values by dotted key that differ from those of configs/default.py for the
                      task, and the task if it is not translation
  commit, date        of the code, and when the run was started for the last time
  hardware, packages  what it ran on, in words, and versions by name
  budget              updates, tokens_per_update, minutes, tokens_per_second
  scores              by split: of translations sacrebleu, paper_bleu, and the signatures of both;
                      of any task the first is its score
  sentences           by split, of translations a row a sentence: length (the longer of source and
                      reference in tokens of the vocabulary, without the end mark), hyp_len, ref_len
                      and the matches c1 to c4 of `bleu.sentence_statistics`; of graphs a row a
                      graph: size (nodes, or the relations of a chain), and 1 if it was told right;
                      of music a row a piece: its tokens, and the nats of these and of its end
  curve               rows of step, valid_loss and the score of the valid split, null if none

The sentences' numbers suffice for BLEU of any selection of them, by bootstrap or by length; no text
of the data is in a record.
"""

import hashlib
import json
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from relpos_jax.errors import InputError

KEYS = (
  *("sweep", "row", "seed", "digest", "config", "commit", "date", "hardware", "packages"),
  *("budget", "scores", "sentences", "curve"),
)
# What a run is called, and where its data lie: the sums of these files are checked.
_INCIDENTAL = ("name", "data.multi30k.path", "data.clutrr.path", "data.chorales.path")
_ARCHIVES = ("MUTAG", "Mutagenicity")  # of `data.tu`, checked likewise; the first is the default


def digest(changes: Mapping[str, Any]) -> str:
  """The first 12 letters of the SHA-256 of a config's values that differ from the defaults.

  Thus a new key, whose default is what was done before, leaves the digests of old records as they
  are. Names and the folders of files whose sums are checked do not count, nor does the keys' order.

  >>> digest({"name": "a", "model.rate": 0.0})
  'b52a29831b1c'
  >>> digest({"seed": 1, "model.rate": 0}) == digest({"model.rate": 0.0, "seed": 1})
  True
  """
  # Where a float belongs, 0 and 0.0 are the same value.
  values = {key: float(x) if type(x) is int else x for key, x in _telling(changes).items()}
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _telling(changes: Mapping[str, Any]) -> dict[str, Any]:
  checked = changes.get("data.tu.name", _ARCHIVES[0]) in _ARCHIVES
  incidental = {*_INCIDENTAL, *["data.tu.path"] * checked}
  return {key: value for key, value in changes.items() if key not in incidental}


def make_record(
  config: Mapping[str, Any],
  changes: Mapping[str, Any],
  environment: Mapping[str, Any],
  metrics: Iterable[Mapping[str, Any]],
  scores: Mapping[str, Any],
  sentences: Mapping[str, list[list[int | float]]],
) -> dict[str, Any]:
  """The record of a run that belongs to no sweep.

  Args:
    config: all values, as in the run's config.json.
    changes: those by dotted key that differ from the defaults.
    environment: as in the run's environment.json.
    metrics: the lines of the run's metrics.jsonl.
    scores, sentences: by split, as in the record.
  """
  metrics = [*metrics]
  return dict(
    sweep="",
    row=config["name"],
    seed=config["seed"],
    digest=digest(changes),
    config=_telling(changes),
    commit=environment["git_commit"],
    date=environment["date"],
    hardware=hardware(environment),
    packages=dict(python=environment["python"], **environment["packages"]),
    budget=_budget(config, metrics),
    scores=dict(scores),
    sentences=dict(sentences),
    curve=[
      [line["step"], line["valid_loss"], valid_score(line)]
      for line in metrics
      if "valid_loss" in line
    ],
  )


def hardware(environment: Mapping[str, Any]) -> str:
  """What a run's environment.json says that it ran on, in words.

  >>> hardware(dict(devices="1 x cpu", cpu_cores=2, cpu="AMD EPYC"))
  '1 x cpu, 2 cores of AMD EPYC'
  """
  return "{devices}, {cpu_cores} cores of {cpu}".format_map(environment)


def valid_score(values: Mapping[str, Any]) -> Any:
  """The first value of the valid split besides the loss, if there is any.

  >>> valid_score(dict(step=7, valid_loss=3.5, valid_bleu=20.0))
  20.0
  """
  names = (name for name in values if name.startswith("valid_") and name != "valid_loss")
  return next((values[name] for name in names), None)


def _budget(config: Mapping[str, Any], metrics: list[Mapping[str, Any]]) -> dict[str, Any]:
  """Minutes are from the first step to the last evaluation, pauses included."""
  speeds = [line["tokens_per_second"] for line in metrics if line.get("tokens_per_second")]
  return dict(
    updates=metrics[-1]["step"],
    tokens_per_update=config["batches"]["tokens"],
    minutes=round((metrics[-1]["time"] - metrics[0]["time"]) / 60, 2),
    tokens_per_second=round(statistics.median(speeds), 1) if speeds else None,
  )


def to_line(record: Mapping[str, Any]) -> str:
  """A record as a line of a results file."""
  return json.dumps(record, separators=(",", ":")) + "\n"


def from_line(line: str) -> dict[str, Any]:
  """A record from its line.

  Raises:
    ValueError: the line is not a whole record.

  >>> from_line('{"sweep":"table1","row":"rel')
  Traceback (most recent call last):
  ...
  ValueError: half-written or no JSON
  """
  try:
    record = json.loads(line)
  except ValueError:
    raise ValueError("half-written or no JSON") from None
  missing = [key for key in KEYS if not isinstance(record, dict) or key not in record]
  if missing:
    raise ValueError(f"not a record: no {missing[0]!r}")
  return record


def read_records(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The records of a results file, a line each; none where there is no file.

  Raises:
    InputError: the file cannot be read; or names the first line that is not a whole record.
  """
  path = pathlib.Path(path)
  records = []
  try:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
  except (OSError, UnicodeDecodeError) as error:
    why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
    raise InputError(f"cannot read {path} ({why}): restore that file, or take it away") from error
  for number, line in enumerate(lines, start=1):
    try:
      records.append(from_line(line))
    except ValueError as error:
      raise InputError(f"{path}, line {number}: {error}: restore or delete that line") from error
  return records
