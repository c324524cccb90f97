r"""Samples music from a trained model; writes it as MIDI or as sound.

  python -m experiments.sample --workdir=runs/music --prime=mine.mid --out=more.mid
  python -m experiments.sample --workdir=runs/music --out=new.mid --seed=3 --top_p=0.95
  python -m experiments.sample --workdir=runs/music --out=new.wav --seed=3 --top_p=0.95

The model continues a prompt, the file --prime, or starts a piece of its own. A model of
chorales reads and writes four voices, in one track or channel each. The same seed gives
the same piece as MIDI, for a sequencer, and as WAV, to listen to.

The command also draws a piano roll (more.png). It shows the prompt on grey, and what
the model attends to at the end. Existing files are not overwritten.
"""

import os
import pathlib

import numpy as np

from experiments import command
from experiments.errors import InputError
from experiments.files import Path

FLAGS = dict(
  workdir=command.WORKDIR,
  out=command.Flag(None, "the file to write: NAME.mid or NAME.wav", is_path=True),
  prime=command.Flag(
    "", "the prompt: a MIDI file to continue; empty: a new piece", is_path=True
  ),
  prime_tokens=command.Flag(
    0, "length of the prompt: the file's first N tokens; 0: all", least=0
  ),
  num_tokens=command.Flag(512, "largest number of new tokens", least=1),
  temperature=command.Flag(
    1.0, "below 1 favours likely tokens; 0 always takes the likeliest", least=0
  ),
  top_k=command.Flag(0, "samples from the k likeliest tokens; 0: from all", least=0),
  top_p=command.Flag(
    1.0, "samples from the likeliest tokens of this total probability", least=0, most=1
  ),
  seed=command.Flag(0, "seed of the samples"),
  average_checkpoints=command.AVERAGE,
)


def main(
  workdir: Path,
  out: pathlib.Path,
  prime: Path | str,
  prime_tokens: int,
  num_tokens: int,
  seed: int,
  average_checkpoints: int,
  **sampling: float,
) -> None:
  """Samples a piece, writes it and draws it."""
  picture = out.with_suffix(".png")
  if out.suffix not in (".mid", ".midi", ".wav"):
    raise InputError(f"--out={out}: give a file name that ends in .mid or .wav")
  if not os.access(out.parent, os.W_OK):
    raise InputError(
      f"--out={out}: there is no folder {out.parent} that you may write to"
    )
  for written in (out, picture):
    if os.path.lexists(written):
      raise InputError(f"{written} exists already: give another --out, or delete it")
  from experiments.music.piano_roll import draw
  from experiments.music.sampling import sample_pieces
  from experiments.music.sound import write_wav
  from experiments.music.train import choose_codec, load_run
  from experiments.systems import load_config
  from relpos_jax.decoding.sampling import SamplingParams

  config = load_config(workdir, "music", average_checkpoints)
  prompt = np.empty(0, int)
  if prime:
    prompt = choose_codec(config).read(prime)[: prime_tokens or None]
  run = load_run(config, workdir)
  options = dict(num_tokens=num_tokens, seed=seed, sampling=SamplingParams(**sampling))
  (piece,) = sample_pieces(run.graphdef, run.params, [prompt], **options)
  if out.suffix == ".wav":
    write_wav(run.vocabulary.decode_score(piece), out)
  else:
    run.vocabulary.write(piece, out)
  print(
    f"wrote {out}: {len(prompt)} tokens of prompt and {len(piece) - len(prompt)} more"
  )
  print(f"drew {draw(run, piece, picture, prompt_length=len(prompt))}")


if __name__ == "__main__":
  command.run(main, FLAGS)
