r"""Trains a model, scores it and draws what it learned.

  python -m experiments.train --config=configs/quickstart.py
  python -m experiments.train --config=configs/multi30k.py:sinusoidal \
      --workdir=runs/sinusoidal
  python -m experiments.train --config=configs/multi30k.py \
      --config.data.multi30k.path=FOLDER
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/k4 \
      --config.model.max_distance=4
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/mine \
      --config.data.source=pairs --config.data.pairs.train=train.en,train.de \
      --config.data.pairs.valid=valid.en,valid.de \
      --config.data.pairs.test="test.en,test.de;long=long.tsv"

The folder --workdir holds the whole run. If the training is stopped, the same command
resumes it from the last checkpoint. While it runs, another command cannot train in the
same folder. The folder may be in a bucket, gs://BUCKET/RUN or s3://BUCKET/RUN; s3://
allows one process only.

Data are downloaded, unless a value such as config.data.multi30k.path names a folder
that holds them.

A signal stops the training, which saves a checkpoint and exits. The status is 143 for
SIGTERM, 130 for Ctrl-C and 129 for SIGHUP, which a closed terminal sends. A second
Ctrl-C exits at once. If the output can no longer be written, as after `| head -1`, the
training goes on.

`tensorboard --logdir=runs/sinusoidal` shows the metrics of the run in that folder, and
with the package xprof also a profile.

To train in several processes, start this command in each, as srun and mpirun do. The
scripts in experiments/launch/ do so on clusters. All processes need the same config,
code and data. Only the first one prints and writes.
"""

import contextlib
import importlib.util
import pathlib
import re
import sys

from ml_collections import ConfigDict

from experiments import command
from experiments.config import defaults, flatten
from experiments.errors import InputError
from experiments.files import Path, in_bucket

FLAGS = dict(
  config=command.CONFIG,
  workdir=command.Flag(
    "", "the run's folder; by default runs/NAME of the config", is_path=True
  ),
  distributed=command.Flag(
    False, "lets JAX find the other processes, as on Cloud TPU VMs and GKE"
  ),
  profile_steps=command.Flag("", "the first and last step to profile, such as 10:20"),
  wandb=command.Flag(
    "", "a project of Weights & Biases, which also receives the metrics"
  ),
)


def main(
  config: ConfigDict,
  workdir: Path | str,
  distributed: bool,
  profile_steps: str,
  wandb: str,
) -> None:
  """Checks the flags, then trains from the last checkpoint, if any, and evaluates."""
  workdir = workdir or pathlib.Path("runs", config.name)
  if wandb and not importlib.util.find_spec("wandb"):
    raise InputError("--wandb needs its package: pip install wandb")
  if not re.fullmatch(r"([1-9]\d*:[1-9]\d*)?", profile_steps):
    raise InputError(f"--profile_steps={profile_steps}: give two steps, such as 10:20")
  if profile_steps and in_bucket(workdir):
    raise InputError(
      "--profile_steps writes no profile into a bucket: give a local --workdir"
    )
  first, _, last = profile_steps.partition(":")
  if profile_steps and int(first) > int(last):
    raise InputError(f"--profile_steps={profile_steps}: give the first step first")
  _train(config, workdir, distributed, profile_steps, wandb)


def _train(
  config: ConfigDict, workdir: Path, distributed: bool, profile_steps: str, wandb: str
) -> None:
  """Checks config and folder in all processes; then calls `train` of the config's task.

  Exits if a signal stops the training.
  """
  from experiments.systems import find_system, parse_config
  from experiments.training import processes
  from experiments.training.environment import code_version
  from experiments.training.loop import Flags, NonFiniteError
  from experiments.training.workdir import check_workdir

  processes.join_processes(distributed)
  output = None  # one process prints
  if processes.is_first() and sys.stdout:
    output = command.DisplayStream(sys.stdout)
  with contextlib.redirect_stdout(output), processes.StopOnSignal() as stop:
    try:
      with contextlib.ExitStack() as stack:
        values = {f"config.{key}": value for key, value in flatten(config).items()}
        processes.check_same(values | code_version())
        with processes.fail_together():
          config = parse_config(config)
          if processes.is_first():
            stack.enter_context(command.lock_folder(workdir, "workdir"))
          check_workdir(workdir, flatten(config), flatten(defaults(config)))
        system = find_system(config.task)
        system.train(config, workdir, Flags(stop, profile_steps, wandb))
    except NonFiniteError as error:
      sys.exit(f"stopped: {error}")
    except processes.Stopped as stopped:
      place = f" {stopped}" if str(stopped) else ""
      print(
        f"stopped by {stop.signal.name}{place}: run the same command again to resume",
        flush=True,
      )
      sys.exit(128 + stop.signal)


if __name__ == "__main__":
  command.run(main, FLAGS)
