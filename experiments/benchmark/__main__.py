r"""Measures attention, training steps and translation.

  python -m experiments.benchmark attention --lengths=512,1024 --implementations=chunked
  python -m experiments.benchmark step --config=configs/multi30k.py --length=16
  python -m experiments.benchmark positions --config=configs/positions.py:chorales --length=512
  python -m experiments.benchmark translate --workdir=runs/shared --input=captions.en
  python -m experiments.benchmark pages --out=results

`pages` measures nothing: it rewrites the tables and pictures from the raw results in a folder.
`python -m experiments.benchmark COMMAND --help` shows the flags of a command.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping

from experiments import command

COMMANDS = ("attention", "step", "positions", "translate", "pages")
FLAGS = dict(
  out=command.Flag("results", "the folder of the raw results and the pages", is_path=True)
)


def write_pages(out: pathlib.Path) -> None:
  """Rewrites the page of each command that has raw results in a folder."""
  from experiments.benchmark import attention, models

  for module in (attention, models):
    module.write_page(out)


def load(name: str) -> tuple[Callable[..., None], Mapping[str, command.Flag]]:
  """Imports a command, which takes a second; returns its main function and its flags."""
  if name == "pages":
    return write_pages, FLAGS
  if name == "attention":
    from experiments.benchmark import attention

    return attention.main, attention.FLAGS
  from experiments.benchmark import models

  return models.COMMANDS[name]


def run(argv: list[str]) -> None:
  """Runs the command that the first argument names with the other arguments as flags."""
  name, *flags = argv or ["--help"]
  if name in ("--help", "-h"):
    name, flags = "pages", ["--help"]
  if name not in COMMANDS:
    print(f"error: no command {name!r}: give {', '.join(COMMANDS)}", file=sys.stderr)
    sys.exit(2)
  main, known = load(name)
  # Attention is measured as in a program of one's own.
  command.run(main, known, flags, keep_memory=name != "attention")


if __name__ == "__main__":
  run(sys.argv[1:])
