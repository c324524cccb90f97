"""The likelihood of pieces as tables tell it, beside the published figures."""

from collections.abc import Mapping, Sequence

import numpy as np

from relpos_jax.music.likelihood import Likelihood

# Huang et al. 2018, table 2: on the valid split of the chorales, nats a token. Quoted second hand:
# nobody has held them against the paper.
PUBLISHED = {"relative": 0.357, "sinusoidal": 0.398}
BASELINE = 0.417
WITH_INSTRUMENTS = 0.37  # sinusoidal, and each token's voice is told


def scores_of(found: Likelihood) -> dict[str, float]:
  """In nats: a token, the ends of pieces included; a token of the music; a time step."""
  return dict(
    nll=found.per_token, without_ends=found.per_token_without_ends, per_step=found.per_step
  )


def rows_of(pieces: Sequence[np.ndarray], found: Likelihood) -> list[list[int | float]]:
  """For a record: of each piece its tokens, and the nats of these and of its end."""
  of_pieces = zip(pieces, found.of_pieces, strict=True)
  return [[len(piece), round(nats, 3)] for piece, nats in of_pieces]


def table(found: Mapping[str, Likelihood], is_published: bool) -> str:
  """A line a split, for people; `is_published`: of the data that the published figures are of."""
  lines = ["split   pieces    nats a token   without ends   nats a step"]
  for split, of in found.items():
    values = f"{of.per_token:15.4f}{of.per_token_without_ends:15.4f}{of.per_step:14.3f}"
    lines.append(f"{split:8}{of.num_pieces:6,}{values}")
  if is_published:
    lines.append(f"{published()}: valid, nats a token")
  return "\n".join(["", *lines, ""])


def published() -> str:
  """The figures, in words, and what they are worth.

  >>> published().partition(": ")[2]
  'baseline 0.417, relative 0.357, sinusoidal 0.398, with instrument labels 0.37'
  """
  figures = dict(baseline=BASELINE) | PUBLISHED | {"with instrument labels": WITH_INSTRUMENTS}
  told = ", ".join(f"{name} {value}" for name, value in figures.items())
  return f"Huang et al. 2018, table 2, quoted second hand, not checked: {told}"
