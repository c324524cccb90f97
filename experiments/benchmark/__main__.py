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

from experiments import command
from experiments.benchmark import attention, models


def write_pages(out: pathlib.Path) -> None:
  """Rewrites the page of each command that has raw results in a folder."""
  for module in (attention, models):
    module.write_page(out)


FLAGS = dict(
  out=command.Flag("results", "the folder of the raw results and the pages", is_path=True)
)
COMMANDS = dict(
  attention=(attention.main, attention.FLAGS),
  step=(models.time_steps, models.STEP_FLAGS),
  positions=(models.time_positions, models.POSITION_FLAGS),
  translate=(models.time_translation, models.TRANSLATE_FLAGS),
  pages=(write_pages, FLAGS),
)


def run(argv: list[str]) -> None:
  """Runs the command that the first argument names with the other arguments as flags."""
  name, *flags = argv or ["--help"]
  if name in ("--help", "-h"):
    name, flags = "pages", ["--help"]
  if name not in COMMANDS:
    print(f"error: no command {name!r}: give {', '.join(COMMANDS)}", file=sys.stderr)
    sys.exit(2)
  main, known = COMMANDS[name]
  # Attention is measured as in a program of one's own.
  command.run(main, known, flags, keep_memory=name != "attention")


if __name__ == "__main__":
  run(sys.argv[1:])
