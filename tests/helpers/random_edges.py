"""Random edges of small graphs, and what they are as matrices of pairs."""

from typing import NamedTuple

import jax
import numpy as np
from calls import normal

NODES, SENDERS, NUM_EDGES = 5, 6, 24  # of each graph
NUM_LABELS, NUM_FEATURES = 3, 2
NUM_ROWS = NUM_LABELS + NUM_FEATURES
HEADS, WIDTH, VALUE_WIDTH = 4, 3, 4


def make_tensors(num_nodes, num_senders, batch=()):
  """Returns a query, a key and a value."""
  return [
    normal(*batch, num_nodes, HEADS, WIDTH),
    normal(*batch, num_senders, 2, WIDTH, seeds=(1,)),
    normal(*batch, num_senders, 2, VALUE_WIDTH, seeds=(2,)),
  ]


def make_tables(heads=()):
  """Returns a table of keys and one of values; labels have the first rows."""
  keys = normal(NUM_ROWS, *heads, WIDTH, seeds=(3,))
  return keys, normal(NUM_ROWS, VALUE_WIDTH, seeds=(4,))


def split(tables):
  """Returns the tables of labels, and those of features; None stays None."""
  of_labels = jax.tree.map(lambda table: table[:NUM_LABELS], tables)
  of_features = jax.tree.map(lambda table: table[NUM_LABELS:], tables)
  return of_labels, of_features


class Edges(NamedTuple):
  """Edges, some of them twice or with several labels, to themselves, or padding."""

  senders: np.ndarray
  receivers: np.ndarray
  labels: np.ndarray
  features: np.ndarray

  @classmethod
  def of_graphs(cls, *batch):
    random = np.random.default_rng(0)
    shape = *batch, NUM_EDGES
    senders = random.integers(-1, SENDERS, shape)
    receivers = random.integers(-1, NODES, shape)
    receivers[receivers == 1] = 0  # node 1 receives no edge
    labels = random.integers(-1, NUM_LABELS, shape)
    return cls(senders, receivers, labels, random.normal(size=(*shape, NUM_FEATURES)))

  @property
  def ends(self):
    return self.senders, self.receivers

  def matrix(self):
    """Returns whether each edge joins each pair, [*B, M, T, S]."""
    is_receiver = self.receivers[..., None] == np.arange(NODES)
    is_sender = self.senders[..., None] == np.arange(SENDERS)
    return is_receiver[..., :, None] & is_sender[..., None, :]

  def of_pairs(self):
    """Returns labels and mean features of pairs, [*B, T, S, R], and the mask."""
    joins = self.matrix()
    has_label = self.labels[..., None] == np.arange(NUM_LABELS)
    labels = np.einsum("...mts,...ml->...tsl", joins, has_label)
    sums = np.einsum("...mts,...mf->...tsf", joins, self.features)
    counts = joins.sum(-3)
    means = sums / np.maximum(counts, 1)[..., None]
    return np.concatenate([labels, means], -1), counts[..., None, :, :] > 0
