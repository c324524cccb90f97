"""The graph encoder: attention with the edge labels of a directed graph.

Shaw et al. 2018, section 3.1: "relation-aware self-attention" over any labelled directed graph.
"""

import dataclasses
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.edges import pair_features, sum_over_pairs
from relpos_jax.models.layers import LayersConfig, SelfAttentionLayer, last_norm
from relpos_jax.nn.attention import kernel_init
from relpos_jax.nn.edges import EdgeTables
from relpos_jax.typing import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphEncoderConfig(LayersConfig):
  """Options of the model, in addition to those of its layers.

  `relative_keys` and `relative_values` add vectors of edge labels to keys and to values; without
  both, edges only determine which nodes see each other. `tables_per_head` and `tables_per_layer`
  apply to the label tables. Nodes have no `positions`. `implementation` "edge_list" takes memory
  for edges only, any other for all pairs of nodes.

  Attributes:
    num_node_labels, num_edge_labels, num_classes: numbers of labels and classes.
    num_node_features, num_edge_features: numbers of float features of a node and of an edge.
      Several edges from one node to another are averaged.
    head: "graph" classifies graphs, "node" nodes, and "pair" the query of each graph, a pair of
      nodes that the model is given.
    readout: "mean" or "sum" over the nodes of a graph, for head "graph".
    sees: a node sees itself and its "neighbours", or "all" nodes of its graph.
    reverse_edges: an edge is also added backwards, with a label and kernels of its own
      ("own_label"), with the same ones ("same_label", which drops the direction), or not at all
      ("none": only the receiver sees the sender).
    layers_shared: apply one layer `num_layers` times.

  Raises:
    ValueError: a value is not one of its choices, or two values exclude each other.
  """

  num_node_labels: int
  num_edge_labels: int
  num_classes: int
  num_node_features: int = 0
  num_edge_features: int = 0
  head: Literal["graph", "node", "pair"] = "graph"
  readout: Literal["mean", "sum"] = "mean"
  sees: Literal["neighbours", "all"] = "neighbours"
  reverse_edges: Literal["own_label", "same_label", "none"] = "own_label"
  layers_shared: bool = False
  positions: Literal["none"] = "none"

  def __post_init__(self):
    super().__post_init__()
    for field in ("head", "readout", "sees", "reverse_edges", "positions"):
      value, choices = getattr(self, field), get_args(GraphEncoderConfig.__annotations__[field])
      if value not in choices:
        raise ValueError(f"{field} is {value!r}; want one of {', '.join(choices)}")
    if self.sees == "all" and self.implementation == "edge_list":
      raise ValueError("sees is 'all' and implementation 'edge_list'; want sees 'neighbours'")

  @property
  def has_tables(self) -> bool:
    """Returns whether self-attention has label tables."""
    return self.relative_keys or self.relative_values

  @property
  def num_table_rows(self) -> int:
    """Returns the number of labels: of edges, of reversed edges, and of a node to itself."""
    return self.num_edge_labels * (2 if self.reverse_edges == "own_label" else 1) + 1

  @property
  def num_kernel_rows(self) -> int:
    """Returns the number of features of edges and of reversed edges."""
    return self.num_edge_features * (2 if self.reverse_edges == "own_label" else 1)


@runtime_checkable
class Graphs(Protocol):
  """B rows of one or several (packed) graphs. -1 is padding everywhere.

  Attributes:
    nodes: labels of nodes.
    segment_ids: index, in its row, of the graph that a node belongs to; below G.
    node_features: floats; F may be 0.
    senders, receivers: indices of the nodes that an edge goes from and to.
    labels: of edges; also -1 for an edge without label.
    edge_features: floats; F may be 0.
    query: indices of the pair of nodes that is classified in each graph.
  """

  nodes: Int[Array, "B T"]
  segment_ids: Int[Array, "B T"]
  node_features: Float[Array, "B T features"]
  senders: Int[Array, "B M"]
  receivers: Int[Array, "B M"]
  labels: Int[Array, "B M"]
  edge_features: Float[Array, "B M F"]
  query: Int[Array, "B G 2"]


class GraphEncoder(nnx.Module):
  """Maps graphs to logits of each graph, each node, or each graph's query.

  Padding and the other graphs of a row have no effect and get no gradient. Permuting the nodes of a
  graph permutes their logits. Dropout is applied if `rngs` are given.

  >>> from relpos_jax.graphs.graph import Graph, GraphBatches
  >>> graph = Graph.of([0, 0, 1], [(0, 1, 3), (1, 2, 0)], target=5, query=(0, 2))
  >>> batches = GraphBatches([graph], boundaries=(4,), node_budget=8, seed=0)
  >>> config = GraphEncoderConfig(num_node_labels=2, num_edge_labels=4, num_classes=6, head="pair",
  ...                             num_layers=1, width=16, num_heads=2, feed_forward=16)
  >>> model = nnx.jit(lambda: GraphEncoder(config, rngs=nnx.Rngs(0)))()
  >>> nnx.jit(lambda model, graphs: model(graphs))(model, batches[0]).shape
  (2, 1, 6)
  """

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embedding = NodeEmbedding(config, rngs=rngs)
    number = 1 if config.layers_shared else config.num_layers
    make = lambda: SelfAttentionLayer(config, None, rngs=rngs)
    self.layers = nnx.List([make() for _ in range(number)])
    own_tables = number if config.tables_per_layer else 1
    tables = [_tables(config, rngs) for _ in range(own_tables if config.has_tables else 0)]
    self.tables = nnx.List(tables)
    self.norm = last_norm(config, rngs)
    self.head = Head(config, rngs=rngs)

  def __call__(self, graphs: Graphs, rngs: nnx.Rngs | None = None) -> Float[Array, "B X C"]:
    """Returns float32 logits of G graphs or queries, or of T nodes, in every row."""
    x = self.embedding(graphs, rngs)
    options = [*self._options(complete(graphs, self.config), graphs.segment_ids)]
    for index in range(self.config.num_layers):
      layer = self.layers[index % len(self.layers)]
      x = layer(x, rngs, **options[index % len(options)])
    return self.head(self.norm(x), graphs, rngs)

  def _options(self, edges: "Edges", segment_ids: Int[Array, "B T"]):
    """Yields the options of attention for each set of tables."""
    if self.config.implementation == "edge_list":
      ends = dict(senders=edges.senders, receivers=edges.receivers)
      for tables in self.tables:
        yield ends | tables.of_list(edges.labels, edges.features)
      if not self.tables:
        yield ends
      return
    features, mask = _pairs(edges, segment_ids, self.config)
    for tables in self.tables:
      yield dict(mask=mask, relations=tables.of_pairs(features))
    if not self.tables:
      yield dict(mask=mask)


class NodeEmbedding(nnx.Module):
  """Embeds nodes: their labels, their features, and whether they are in the query."""

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    options = dict(embedding_init=jax.nn.initializers.normal(1.0), rngs=rngs)
    self.table = nnx.Embed(config.num_node_labels, config.width, **options)
    self.places = nnx.Embed(2, config.width, **options) if config.head == "pair" else None
    features = config.num_node_features
    self.features = (
      nnx.Linear(features, config.width, kernel_init=kernel_init, rngs=rngs) if features else None
    )
    self.dropout = nnx.Dropout(config.embedding_dropout_rate)
    self.dtype = config.dtype

  def __call__(self, graphs: Graphs, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
    x = self.table(jnp.maximum(graphs.nodes, 0))
    if self.features is not None:
      x += self.features(graphs.node_features)
    if self.places is not None:
      is_asked = jax.nn.one_hot(graphs.query, x.shape[1], dtype=x.dtype)  # [B, G, 2, T]
      x += jnp.einsum("BGPT,PD->BTD", is_asked, self.places.embedding[...])
    return self.dropout(x.astype(self.dtype), deterministic=rngs is None, rngs=rngs)


class Head(nnx.Module):
  """The classifier of graphs, nodes or queries: a hidden layer and the logits of the classes."""

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    options = dict(kernel_init=kernel_init, dtype=config.dtype, rngs=rngs)
    width = config.width
    self.hidden = nnx.Linear(2 * width if config.head == "pair" else width, width, **options)
    self.dropout = nnx.Dropout(config.dropout_rate)
    self.out = nnx.Linear(width, config.num_classes, **options)
    self.kind, self.readout = config.head, config.readout

  def __call__(
    self, x: Float[Array, "B T D"], graphs: Graphs, rngs: nnx.Rngs | None = None
  ) -> Float[Array, "B X C"]:
    """Returns float32 logits; X is G for graphs and for queries, T for nodes."""
    if self.kind == "pair":
      x = _nodes_of_queries(x, graphs.query)
    elif self.kind == "graph":
      x = _readout(x, graphs.segment_ids, graphs.query.shape[1], self.readout)
    hidden = jax.nn.relu(self.hidden(x))
    return self.out(self.dropout(hidden, deterministic=rngs is None, rngs=rngs)).astype(jnp.float32)


class Edges(NamedTuple):
  """Edges: the receiver sees the sender."""

  senders: Int[Array, "B M"]
  receivers: Int[Array, "B M"]
  labels: Int[Array, "B M"]
  features: Float[Array, "B M F"]


def complete(graphs: Graphs, config: GraphEncoderConfig) -> Edges:
  """Adds an edge from each node to itself and, if asked for, reversed edges.

  M edges of T nodes become M + T, or 2 M + T with reversed edges. A reversed edge with a label of
  its own has its edge's label plus E; edges from a node to itself have the last label. Features are
  those of the pair of nodes: see `_means_over_pairs`.
  """
  edges = Edges(graphs.senders, graphs.receivers, graphs.labels, graphs.edge_features)
  node = jnp.broadcast_to(jnp.arange(graphs.nodes.shape[1]), graphs.nodes.shape)
  node = jnp.where(graphs.nodes >= 0, node, -1)
  no_features = jnp.zeros((*node.shape, edges.features.shape[-1]), edges.features.dtype)
  itself = Edges(node, node, jnp.full_like(node, config.num_table_rows - 1), no_features)
  parts = [edges, itself]
  if config.reverse_edges != "none":
    more = config.num_edge_labels if config.reverse_edges == "own_label" else 0
    labels = jnp.where(edges.labels >= 0, edges.labels + more, -1)
    parts.append(Edges(edges.receivers, edges.senders, labels, edges.features))
  all_edges: Edges = jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *parts)
  if not all_edges.features.shape[-1]:
    return all_edges
  index = jnp.arange(all_edges.senders.shape[1])[:, None]
  ahead, back = index < edges.senders.shape[1], index >= sum(x.senders.shape[1] for x in parts[:2])
  ways = [ahead, back] if config.reverse_edges == "own_label" else [ahead | back]
  return all_edges._replace(features=_means_over_pairs(all_edges, ways, node.shape[1]))


def _means_over_pairs(
  edges: Edges, ways: list[Bool[Array, "M 1"]], num_nodes: int
) -> Float[Array, "B M R"]:
  """Averages, for every edge, the features over its pair's edges in each direction; R = ways * F.

  The operator's mean over all edges of a pair then leaves the features as they are: neither edges
  in the other direction nor an edge from a node to itself dilute them.
  """
  counted = jnp.concatenate([edges.features, jnp.ones_like(edges.features[..., :1])], -1)
  of_ways = jnp.concatenate([jnp.where(way, counted, 0) for way in ways], -1)
  sums = sum_over_pairs(edges.senders, edges.receivers, of_ways, num_nodes=num_nodes)
  means = [x[..., :-1] / jnp.maximum(x[..., -1:], 1) for x in jnp.split(sums, len(ways), -1)]
  return jnp.concatenate(means, -1)


def _pairs(
  edges: Edges, segment_ids: Int[Array, "B T"], config: GraphEncoderConfig
) -> tuple[Float[Array, "B T T R"], Bool[Array, "B 1 T T"]]:
  """Returns labels and features of every pair of nodes, and the mask."""
  features, mask = pair_features(
    *edges, num_labels=config.num_table_rows, num_nodes=segment_ids.shape[1]
  )
  if config.sees == "all":
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids >= 0)[:, None, :]
  return features, mask[:, None]


def _readout(
  x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"], num_graphs: int, kind: str
) -> Float[Array, "B G D"]:
  """Computes the mean or sum of each graph's nodes, in float32 or wider; 0 for a missing graph."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  belongs = jax.nn.one_hot(segment_ids, num_graphs, dtype=wide)
  sums = jnp.einsum("BTG,BTD->BGD", belongs, x.astype(wide))
  if kind == "mean":
    sums /= jnp.maximum(belongs.sum(1), 1)[..., None]
  return sums.astype(x.dtype)


def _nodes_of_queries(
  x: Float[Array, "B T D"], query: Int[Array, "B G 2"]
) -> Float[Array, "B G 2*D"]:
  """Concatenates the two nodes of each query."""
  rows, graphs, _ = query.shape
  indices = jnp.maximum(query, 0).reshape(rows, -1, 1)
  return jnp.take_along_axis(x, indices, axis=1).reshape(rows, graphs, -1)


def _tables(config: GraphEncoderConfig, rngs: nnx.Rngs) -> EdgeTables:
  return EdgeTables(
    config.num_table_rows,
    config.width // config.num_heads,
    num_features=config.num_kernel_rows,
    num_heads=config.num_heads if config.tables_per_head else None,
    keys=config.relative_keys,
    values=config.relative_values,
    dtype=config.dtype,
    rngs=rngs,
  )
