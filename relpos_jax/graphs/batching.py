"""Batches of graphs of similar size, each determined by the seed and the step alone."""

from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

import numpy as np

from relpos_jax.data.batching import Schedule
from relpos_jax.graphs.graph import Graph
from relpos_jax.typing import Array, Float, Int

PAD = -1


class GraphBatch(NamedTuple):
  """B rows of up to G graphs, padded with -1 to T nodes and M edges; features padded with 0.

  Attributes:
    nodes: node labels.
    segment_ids: the number, within its row, of each node's graph.
    node_features: real-valued features of nodes.
    senders, receivers: the source and target of each edge, as node indices in the row.
    labels: edge labels; also -1 for an edge without a label.
    edge_features: real-valued features of edges.
    query: the pair of nodes to classify in each graph, as node indices in the row.
    target: the class of each graph or query, [B, G]; or of each node, [B, T].
  """

  nodes: Int[Array | np.ndarray, "B T"]
  segment_ids: Int[Array | np.ndarray, "B T"]
  node_features: Float[Array | np.ndarray, "B T features"]
  senders: Int[Array | np.ndarray, "B M"]
  receivers: Int[Array | np.ndarray, "B M"]
  labels: Int[Array | np.ndarray, "B M"]
  edge_features: Float[Array | np.ndarray, "B M F"]
  query: Int[Array | np.ndarray, "B G 2"]
  target: Int[Array | np.ndarray, "B X"]


class GraphBatches:
  """An endless sequence of batches: `batches[step]` for any step >= 0.

  A row holds one graph, in the bucket of the smallest boundary that holds its nodes; the batches of
  a bucket have node_budget // boundary rows. With `packed`, a row holds as many graphs as fit into
  the last boundary (the largest graph first, into the first row with room), and rows are shuffled
  rather than graphs. Each epoch shows every graph once. Rows of padding fill the last batch of a
  bucket, and round the number of rows up to `multiple_of`. Safe to read from several threads.

  Attributes:
    num_per_epoch: batches per epoch, the same in every epoch.
    shapes: all (rows, nodes, edges, graphs) that occur, one compilation of a training step each.
    dropped: the number of graphs with more nodes than the last boundary; they are left out.

  >>> triangle = Graph.of([0, 0, 0], [(0, 1, 0), (1, 2, 0), (2, 0, 1)], target=1)
  >>> single = Graph.of([0], [], target=0)
  >>> batches = GraphBatches([triangle, single], boundaries=(2, 4), node_budget=4, seed=0)
  >>> print(batches)
  shapes 2x2 1x4, batches per epoch: 2, dropped (above 4): 0, padding: 50%
  >>> packed = GraphBatches([triangle, single], boundaries=(4,), node_budget=4, seed=0, packed=True)
  >>> packed[0].segment_ids.tolist(), packed[0].target.tolist()
  ([[0, 0, 0, 1]], [[1, 0]])
  """

  def __init__(
    self,
    graphs: Sequence[Graph],
    *,
    boundaries: Sequence[int],
    node_budget: int,
    multiple_of: int = 1,
    packed: bool = False,
    seed: int | None,
  ):
    """Sorts the graphs into buckets.

    Args:
      graphs: all with features of the same widths and targets of the same kind.
      boundaries: padded numbers of nodes, increasing.
      node_budget: the most nodes per batch over all devices, padding included.
      multiple_of: devices times microbatches; the number of rows is a multiple of it.
      packed: puts several graphs into a row.
      seed: determines the order. None keeps the order of buckets and graphs, for evaluation: see
        `order`.

    Raises:
      InputError: the boundaries do not increase, the budget is too small for `multiple_of` rows, or
        no graph is small enough.
    """
    sizes = np.array([len(graph.nodes) for graph in graphs], int)
    rows = _packed(sizes, boundaries[-1]) if packed else [[graph] for graph in range(len(sizes))]
    self._graphs, self._rows = graphs, rows
    sizes_of_rows = np.array([sizes[row].sum() for row in rows], int)
    self._schedule = Schedule(
      sizes_of_rows,
      boundaries=boundaries,
      budget=node_budget,
      multiple_of=multiple_of,
      seed=seed,
    )
    buckets = self._schedule.buckets
    self.num_per_epoch, self.dropped = self._schedule.num_per_epoch, self._schedule.dropped
    self.shapes = tuple(
      (*shape, self._most_edges(bucket), max(len(rows[row]) for row in bucket))
      for shape, bucket in zip(self._schedule.shapes, buckets, strict=True)
    )
    nodes = sum(sizes_of_rows[bucket].sum() for bucket in buckets)
    self.padding = float(1 - nodes / self._schedule.cells)

  def _most_edges(self, rows: Int[np.ndarray, "rows"]) -> int:
    """Returns the most edges in any of the rows, and at least one: no array has size zero."""
    num_edges = lambda row: sum(len(self._graphs[graph].senders) for graph in self._rows[row])
    return max(1, *map(num_edges, rows))

  def __getitem__(self, step: SupportsIndex) -> GraphBatch:
    chosen, bucket = self._schedule[step]
    rows = [[self._graphs[graph] for graph in self._rows[row]] for row in chosen]
    first = rows[0][0]
    widths = first.node_features.shape[1], first.edge_features.shape[1]
    batch = empty_batch(self.shapes[bucket], *widths, per_node=bool(first.target.ndim))
    for row, graphs in enumerate(rows):
      _write(batch, row, graphs)
    return batch

  @property
  def examples(self) -> Sequence[Graph]:
    """Returns the graphs before batching."""
    return self._graphs

  def order(self, step: SupportsIndex) -> list[int]:
    """Returns the indices of the graphs in a step's batch, row by row."""
    return [graph for row in self._schedule[step][0] for graph in self._rows[row]]

  def __str__(self) -> str:
    return f"{self._schedule}, padding: {self.padding:.0%}"


def empty_batch(
  shape: tuple[int, int, int, int],
  num_node_features: int = 0,
  num_edge_features: int = 0,
  *,
  per_node: bool = False,
) -> GraphBatch:
  """Returns a batch of shape (rows, nodes, edges, graphs) that is all padding.

  `per_node`: targets are classes of nodes, not of graphs.

  >>> empty_batch((2, 3, 5, 1)).target.tolist()
  [[-1], [-1]]
  """
  rows, nodes, edges, graphs = shape
  full = lambda *shape: np.full((rows, *shape), PAD, np.int32)
  return GraphBatch(
    nodes=full(nodes),
    segment_ids=full(nodes),
    node_features=np.zeros((rows, nodes, num_node_features), np.float32),
    senders=full(edges),
    receivers=full(edges),
    labels=full(edges),
    edge_features=np.zeros((rows, edges, num_edge_features), np.float32),
    query=full(graphs, 2),
    target=full(nodes if per_node else graphs),
  )


def _packed(sizes: Int[np.ndarray, "graphs"], capacity: int) -> list[list[int]]:
  """Assigns graphs to rows: first fit, largest first; a graph above capacity has its own row."""
  rows: list[list[int]] = []
  room: list[int] = []
  for graph in np.argsort(-sizes, kind="stable"):
    size = int(sizes[graph])
    row = next((row for row, free in enumerate(room) if size <= free), None)
    if row is None:
      row = len(rows)
      rows.append([])
      room.append(capacity)
    rows[row].append(int(graph))
    room[row] -= size
  return rows


def _write(batch: GraphBatch, row: int, graphs: Sequence[Graph]) -> None:
  node = edge = 0
  for number, graph in enumerate(graphs):
    nodes, edges = slice(node, node + len(graph.nodes)), slice(edge, edge + len(graph.senders))
    batch.nodes[row, nodes] = graph.nodes
    batch.segment_ids[row, nodes] = number
    batch.node_features[row, nodes] = graph.node_features
    batch.senders[row, edges] = graph.senders + node
    batch.receivers[row, edges] = graph.receivers + node
    batch.labels[row, edges] = graph.labels
    batch.edge_features[row, edges] = graph.edge_features
    batch.query[row, number] = np.where(graph.query < 0, PAD, graph.query + node)
    batch.target[row, nodes if graph.target.ndim else number] = graph.target
    node, edge = nodes.stop, edges.stop
