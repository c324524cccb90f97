"""Token streams and batches stay the same over versions: resumed runs need them."""

import hashlib
from collections.abc import Iterable

import numpy as np
import pytest

from experiments.data import tokenizer as tok
from experiments.data.batching import Batches, bucket_boundaries, pair_lengths
from experiments.graphs.graph import Graph, GraphBatches
from experiments.music import performance, voices
from experiments.music.data import MusicRows
from experiments.music.midi_files import Note, Part, Score
from experiments.translation.corpus import load_embedded


def digest(arrays: Iterable[np.ndarray]) -> str:
  """Hashes integers, their shapes and their order."""
  text = "\n".join(f"{np.shape(array)} {array.tolist()}" for array in arrays)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def two_epochs(batches) -> list[np.ndarray]:
  """Returns the arrays of the batches of two epochs."""
  steps = range(2 * batches.num_per_epoch)
  return [array for step in steps for array in batches[step]]


FORGED = "a </s> <unk> b", "<pad>", "", "  two  spaces\ttab ", "▁ \u00a0 … Ġ"


@pytest.fixture(scope="module")
def pairs():
  return load_embedded().splits["test"]


@pytest.mark.parametrize(
  "kind, size, streams, epochs",
  [
    ("bpe", 600, "8daf7eda7f73bfc7", "337cefeffd09bed1"),
    ("words", 600, "dc163eeb82cb9238", "15980e6ffa770644"),
    ("words", 10**5, "7297fc00548e869a", "5db1a00bc3832d31"),
  ],
)
def test_text_has_the_same_tokens_and_batches(pairs, kind, size, streams, epochs):
  lines = [line for pair in pairs for line in pair]
  tokenizer = tok.train_tokenizer([*lines, *FORGED], kind, size)
  ids = tok.encode(tokenizer, [*lines, *FORGED])
  assert digest(ids) == streams
  sides = tok.encode_pairs(tokenizer, pairs)
  boundaries = bucket_boundaries(pair_lengths(*sides), 4, max_length=30)
  options = dict(boundaries=boundaries, budget=600, seed=7)
  options |= dict(multiple_of=2, length_multiple_of=3)
  assert digest(two_epochs(Batches(*sides, **options))) == epochs


def random_scores() -> list[Score]:
  random = np.random.default_rng(0)
  scores = []
  for number in (1, 30, 90):
    drawn = random.integers([0, 1, 40, 1], [900, 400, 90, 128], (4, number, 4))
    parts = []
    for voice in drawn.tolist():
      notes = [Note(start, start + length, *others) for start, length, *others in voice]
      parts.append(Part("", notes))
    scores.append(Score(parts, 96, [(0, 0.5), (300, 0.7)]))
  return scores


@pytest.mark.parametrize(
  "codec, streams, epochs",
  [
    (performance.CODEC, "f9d95d47aa00946e", "a7f69d518dd6cd8f"),
    (voices.CODEC, "d8ae4171dbd54fb5", "2a117f9c712025ae"),
  ],
  ids=["events", "voices"],
)
def test_music_has_the_same_tokens_and_batches(codec, streams, epochs):
  pieces = [codec.encode_score(score, "a score") for score in random_scores()]
  assert digest(pieces) == streams
  rows = MusicRows(pieces, codec, longest=40, random_slices=True, semitones=3, seed=2)
  batches = Batches(rows, boundaries=(16, 40), budget=160, seed=2)
  assert digest(two_epochs(batches)) == epochs


def test_graphs_have_the_same_batches():
  random = np.random.default_rng(0)
  graphs = []
  for number in range(1, 30):
    edges = random.integers(0, number, (2 * number, 3))
    nodes = random.integers(0, 4, number)
    query = random.integers(0, number, 2)
    node_features = random.integers(0, 9, (number, 2))
    edge_features = random.integers(0, 2, (len(edges), 1))
    features = dict(node_features=node_features, edge_features=edge_features)
    graphs.append(
      Graph.from_edges(nodes, edges, target=number % 3, query=query, **features)
    )
  options = dict(boundaries=(10, 20), budget=60, multiple_of=2, seed=3)
  assert digest(two_epochs(GraphBatches(graphs, **options))) == "e1520af4c87f8b20"
