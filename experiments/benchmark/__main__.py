r"""Measures attention, training steps, decoding and memory, or counts a TPU kernel's instructions.

  python -m experiments.benchmark attention --lengths=512,1024 --implementations=chunked
  python -m experiments.benchmark step --config=configs/multi30k.py --length=16
  python -m experiments.benchmark decode --config=configs/multi30k.py --beam_sizes=1,4
  python -m experiments.benchmark memory --lengths=512,2048,8192
  python -m experiments.benchmark tpu_bundles --lengths=4096,16384
  python -m experiments.benchmark pages --out=results

`pages` measures nothing: it rewrites the tables and pictures from the raw results in a folder.
`python -m experiments.benchmark COMMAND --help` shows the flags of a command.
"""

import importlib
import pathlib
import sys

from experiments import command

COMMANDS = ("attention", "step", "decode", "memory", "tpu_bundles")
FLAGS = dict(out=command.Flag("results", "the folder of the raw results and the pages"))


def main(out: str) -> None:
  """Rewrites the page of each command that has raw results in a folder."""
  for name in COMMANDS:
    importlib.import_module(f"experiments.benchmark.{name}").write_page(pathlib.Path(out))


def run(argv: list[str]) -> None:
  """Runs the command that the first argument names with the other arguments as flags."""
  name, *flags = argv or ["--help"]
  if name in COMMANDS:
    module = importlib.import_module(f"experiments.benchmark.{name}")
    command.run(module.main, module.FLAGS, flags)
  elif name in ("pages", "--help", "-h"):
    command.run(main, FLAGS, flags if name == "pages" else [name])
  else:
    print(f"error: no command {name!r}: give {', '.join(COMMANDS)} or pages", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
  run(sys.argv[1:])
