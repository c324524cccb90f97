"""An English-German corpus from a synchronous grammar, so that nothing need be downloaded.

The tables hold the words, `tree` what a sentence says, `sampling` makes random trees that make
sense, and `english` and `german` put one tree into the words and the order of each language.
"""

from relpos_jax.data.corpus import Corpus
from relpos_jax.data.embedded.splits import SIZES, derivations
from relpos_jax.errors import InputError


def load(seed: int = 0, train_size: int = 20_000) -> Corpus:
  """Makes the corpus: train, valid (500), test (500) and long (200 sentences).

  Sentences have 3 to 30 words, those of `long` 31 to 60. The corpus is the same for a seed on
  every machine, and no sentence of either language is in two splits. The splits other than train do
  not depend on `train_size`.

  Raises:
    InputError: train_size is not positive.

  >>> {name: len(pairs) for name, pairs in load(train_size=10).splits.items()}
  {'train': 10, 'valid': 500, 'test': 500, 'long': 200}
  """
  if train_size < 1:
    raise InputError(f"train_size {train_size} for embedded: give at least 1, such as 20000")
  splits: dict[str, list[tuple[str, str]]] = {name: [] for name in ("train", *SIZES)}
  for name, derivation in derivations(seed, train_size):
    splits[name].append((derivation.source, derivation.target))
  return Corpus(splits)
