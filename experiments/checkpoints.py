r"""Lists and verifies the checkpoints of a run, and deletes old ones.

  python -m experiments.checkpoints --workdir=runs/mine
  python -m experiments.checkpoints --workdir=runs/mine --verify
  python -m experiments.checkpoints --workdir=runs/mine --prune=3

Prints one line per checkpoint: step, date, bytes and state. `--verify` compares every file with
its digest, and renames and deletes nothing. `--prune=N` verifies from the newest checkpoint on,
keeps the newest N good ones and deletes older ones; if fewer are good, it deletes none. Damaged
checkpoints are kept, including those that training renamed to `damaged-STEP` (see their
`reason.txt`).

Exit status: 0; 1 if there is a damaged checkpoint; 2 for bad input. The command uses the CPU only
and may run during training.
"""

import contextlib
import datetime
import os
import pathlib
import shutil
import sys

from experiments import command
from experiments.errors import InputError
from experiments.files import Path, in_bucket

FLAGS = dict(
  workdir=command.WORKDIR,
  verify=command.Flag(False, "read every file and compare it with its digest"),
  prune=command.Flag(
    0, "number of the newest good checkpoints to keep; older ones are deleted", least=0
  ),
)


def main(workdir: Path, verify: bool, prune: int) -> None:
  """Lists checkpoints, and deletes old ones with --prune."""
  import jax

  from experiments.training.checkpoint_reader import Damage, examine, list_damaged, list_steps

  if in_bucket(workdir):
    raise InputError(f"{workdir} is in a bucket: copy it to a local folder, and give that")
  folder = workdir / "checkpoints"
  steps, renamed = list_steps(folder), list_damaged(folder)
  if not steps and not renamed:
    raise InputError(f"no checkpoints in {folder}: give the --workdir of a run")
  jax.config.update("jax_platforms", "cpu")  # The run may be using the accelerators.
  states, num_good = {}, 0
  for path in (folder / str(step) for step in reversed(steps)):
    states[path] = "not read"
    if num_good < (prune or len(steps) * verify):
      try:
        examine(path)
        states[path] = "good"
        num_good += 1
      except Damage as damage:
        # The run may have deleted it meanwhile.
        states[path] = f"damaged: {damage}" if path.exists() else "deleted"
  if num_good < prune:
    print(f"{num_good} good: fewer than {prune}, none of them is deleted")
  elif prune:
    for path in [path for path, state in states.items() if state == "not read"]:
      with contextlib.suppress(FileNotFoundError):  # The run deletes it as well.
        print(f"deleted {path} ({_num_bytes(path):,} bytes)")
        shutil.rmtree(path)
      del states[path]
  states |= {path: f"damaged: {reason}" for path, reason in renamed.items()}
  for path, state in states.items():
    with contextlib.suppress(FileNotFoundError):  # The run deleted it meanwhile.
      date = datetime.datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes")
      print(f"{path.name:>12}  {date}  {_num_bytes(path):>15,} bytes  {state}")
  if any(state.startswith("damaged") for state in states.values()):
    sys.exit(1)


def _num_bytes(path: pathlib.Path) -> int:
  return sum(os.stat(f"{folder}/{name}").st_size for folder, _, x in os.walk(path) for name in x)


if __name__ == "__main__":
  command.run(main, FLAGS)
