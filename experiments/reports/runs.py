"""The table of some finished runs of translation, in Markdown.

Every number comes from the runs' own files: results.json, metrics.jsonl, environment.json and
config.json. Minutes are those from the first step of training to the last, evaluations on the way
included, and tokens a second are target tokens, the median over training.
"""

import pathlib
from typing import Any

import numpy as np

from relpos_jax.errors import InputError
from relpos_jax.evaluation.record import hardware
from relpos_jax.training.reporting import read_metrics
from relpos_jax.training.workdir import read_json, short_commit

_SCORES = ("sacrebleu", "paper_bleu")
_COLUMNS = (
  "| run | positions | updates | minutes | tokens/s | valid loss | sacreBLEU | paper's BLEU |\n"
  "|---|---|---|---|---|---|---|---|"
)


def write(workdirs: str, out: str) -> None:
  """One row a run, then how each was made: into the file `out`, or printed where that is "-".

  Raises:
    InputError: a folder of `workdirs`, which commas separate, is of no finished run, or the file
      cannot be written.
  """
  runs = [read_run(pathlib.Path(name)) for name in workdirs.split(",")]
  signatures = {run["results"]["test"][kind]["signature"] for run in runs for kind in _SCORES}
  text = "\n".join(
    [_COLUMNS, *map(_row, runs), "", *sorted(signatures), "", *map(_provenance, runs)]
  )
  if out == "-":
    print(text)
    return
  try:
    pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(out).write_text(text + "\n", encoding="utf-8")
  except OSError as error:
    raise InputError(f"cannot write --out={out} ({error.strerror}): give another file") from error


def read_run(workdir: pathlib.Path) -> dict[str, Any]:
  """What a finished run's folder says.

  Raises:
    InputError: a file of it is missing or damaged, or its training ended without an evaluation.
  """
  names = ("config", "environment", "results")
  for name in names:
    if not (workdir / f"{name}.json").exists():
      raise InputError(f"no {name}.json in {workdir}: name the folder of a finished run")
  run = {name: read_json(workdir / f"{name}.json") for name in names}
  if (task := run["config"].get("task", "translation")) != "translation":
    raise InputError(f"{workdir} is a run of {task}: name runs of translation")
  metrics = read_metrics(workdir)
  for number in ("tokens_per_second", "valid_loss"):
    if not _numbers(metrics, number):
      raise InputError(
        f"no {number} in {workdir / 'metrics.jsonl'}: name the folder of a finished run"
      )
  return run | dict(metrics=metrics)


def _row(run: dict[str, Any]) -> str:
  metrics, test = run["metrics"], run["results"]["test"]
  cells = [
    run["config"]["name"],
    run["config"]["model"]["positions"],
    f"{metrics[-1]['step']:,}",
    f"{(metrics[-1]['time'] - metrics[0]['time']) / 60:.1f}",
    f"{np.median(_numbers(metrics, 'tokens_per_second')):,.0f}",
    _last_loss(metrics),
    *(f"{test[kind]['value']:.2f}" for kind in _SCORES),
  ]
  return f"| {' | '.join(cells)} |"


def _last_loss(metrics: list[dict[str, Any]]) -> str:
  *_, last = (line["valid_loss"] for line in metrics if "valid_loss" in line)
  return "not finite" if last is None else f"{last:.3f}"


def _numbers(metrics: list[dict[str, Any]], name: str) -> list[float]:
  """The values of this name, in order of steps."""
  return [line[name] for line in metrics if line.get(name) is not None]


def _provenance(run: dict[str, Any]) -> str:
  where = run["environment"]
  packages = ", ".join(f"{name} {where['packages'][name]}" for name in ("jax", "flax"))
  return (
    f"- {run['config']['name']}: {where['date'][:10]}, {hardware(where)}, "
    f"Python {where['python']}, {packages}, commit {short_commit(where['git_commit'])}"
  )
