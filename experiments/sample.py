r"""Lets a trained model of music go on, from a prime or from nothing, into a MIDI file.

  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.sample --workdir=runs/music --out=new.mid --seed=3 --top_p=0.95

A model of chorales reads and writes four voices, a track or a channel each. Draws the piano roll
beside it (more.png): the prime on grey, and how far back the model looks. Neither file may be there
already.
"""

import os
import pathlib

import numpy as np

from experiments import command
from experiments.run import load_run, load_task
from relpos_jax.decoding.sampling import SamplingParams, check_sampling
from relpos_jax.errors import InputError
from relpos_jax.music.sampler import check_room
from relpos_jax.music.task import MusicTask, draw, make_sampler
from relpos_jax.training.workdir import check_writable
from relpos_jax.typing import Int

FLAGS = dict(
  workdir=command.Flag(None, "the folder of a training run"),
  out=command.Flag(None, "the MIDI file to write"),
  prime=command.Flag("", "a MIDI file to go on from; the beginning of a piece if not given"),
  prime_tokens=command.Flag(0, "of the prime so many tokens are read; 0 is all"),
  num_tokens=command.Flag(512, "so many are to follow, at most"),
  context=command.Flag(2048, "the most tokens of a piece, prime and all"),
  temperature=command.Flag(1.0, "below 1 the likelier tokens are drawn more often; 0: always"),
  top_k=command.Flag(0, "draw of so many of the likeliest tokens; 0 is of all"),
  top_p=command.Flag(1.0, "of the likeliest, which have this probability together"),
  seed=command.Flag(0, "another one gives another piece"),
)


def main(
  workdir: str,
  out: str,
  prime: str,
  prime_tokens: int,
  num_tokens: int,
  context: int,
  temperature: float,
  top_k: int,
  top_p: float,
  seed: int,
) -> None:
  """Reads the prime, samples, writes and draws."""
  path = _midi_path(out)
  sampling = SamplingParams(temperature, top_k, top_p)
  check_sampling(sampling)
  if not 0 <= seed < 2**32:  # JAX drops the bits above
    raise InputError(f"--seed={seed}: give a number from 0 to 2**32 - 1")
  begun = _read_prime(workdir, prime, prime_tokens)
  check_room(len(begun), num_tokens, context)
  run = load_run(workdir)
  sampler = make_sampler(run, context)
  (piece,) = sampler([begun], num_tokens=num_tokens, seed=seed, sampling=sampling)
  run.vocabulary.write(piece, path)
  picture = draw(run, piece, _picture(path), prime=len(begun))
  print(f"wrote {path}: {len(begun)} tokens of the prime and {len(piece) - len(begun)} more")
  print(f"drew {picture}")


def _read_prime(workdir: str, prime: str, num_tokens: int) -> Int[np.ndarray, "_"]:
  """The tokens to go on from, as the run writes music."""
  if num_tokens < 0:
    raise InputError(f"--prime_tokens={num_tokens}: give 0, for all, or more")
  if num_tokens and not prime:
    raise InputError(f"--prime_tokens={num_tokens}: give a --prime, too")
  task = load_task(workdir)
  if not isinstance(task, MusicTask):
    raise InputError(f"--workdir={workdir} is a run of {task.config.task}: give one of music")
  tokens = task.codec.read(prime) if prime else np.empty(0, int)
  return tokens[: num_tokens or None]


def _midi_path(out: str) -> pathlib.Path:
  path = pathlib.Path(out)
  if path.suffix not in (".mid", ".midi"):
    raise InputError(f"--out={out}: give a file name that ends in .mid")
  if not os.path.isdir(path.parent):  # the os says no, where pathlib would raise
    raise InputError(f"--out={out}: there is no folder {path.parent}")
  for written in (path, _picture(path)):
    if os.path.lexists(written):
      raise InputError(f"{written} is there already: give another --out, or delete it")
  check_writable(path.parent, "give another --out")
  return path


def _picture(path: pathlib.Path) -> pathlib.Path:
  return path.with_suffix(".png")


if __name__ == "__main__":
  command.run(main, FLAGS)
