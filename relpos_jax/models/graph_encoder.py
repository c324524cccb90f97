"""A Transformer encoder for labelled graphs, after Shaw et al. 2018, section 3.1."""

import dataclasses
import functools
import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from relpos_jax.attention.arrays import accumulation_dtype
from relpos_jax.attention.edge_list import group_edges, sum_groups
from relpos_jax.attention.edges import pair_features
from relpos_jax.attention.relations import EdgeFeatures, EdgeLabels
from relpos_jax.models.layers import Layer, LayersConfig, last_norm
from relpos_jax.nn.attention import kernel_init
from relpos_jax.nn.feed_forward import drop
from relpos_jax.nn.positions import init_table
from relpos_jax.typing import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphEncoderConfig(LayersConfig):
  """Holds the options of the model, in addition to the options of its layers.

  `relative_keys` and `relative_values` decide whether vectors of edge labels are added
  to keys, and to values. If both are False, edges only decide which nodes attend to
  each other. `tables_per_head` and `tables_per_layer` apply to the tables of edge
  labels. Nodes have no positions. If `implementation` is "edge_list", memory grows with
  the number of edges. Otherwise it grows with the number of pairs of nodes.

  Attributes:
    num_node_labels, num_edge_labels, num_classes: the numbers of labels and classes.
    num_node_features, num_edge_features: the numbers of float features per node and per
      edge. If several edges join a pair of nodes, their features are averaged.
    head: what to classify: "graph", "node" or "pair". "pair" classifies two nodes of
      each graph, its `GraphBatch.query`.
    readout: "mean" or "sum" over the nodes of a graph, for head "graph".
    sees: which nodes a node attends to: itself and its "neighbours", or "all" nodes of
      the graph.
    reverse_edges: "own_label" adds the reverse of each edge. A reverse edge has its own
      label, and its features are projected by their own matrices. "none" adds nothing:
      the receiver of an edge attends to the sender, but not the sender to the receiver.
  """

  num_node_labels: int
  num_edge_labels: int
  num_classes: int
  num_node_features: int = 0
  num_edge_features: int = 0
  head: Literal["graph", "node", "pair"] = "graph"
  readout: Literal["mean", "sum"] = "mean"
  sees: Literal["neighbours", "all"] = "neighbours"
  reverse_edges: Literal["own_label", "none"] = "own_label"

  def __post_init__(self):
    super().__post_init__()
    if self.sees == "all" and self.implementation == "edge_list":
      raise ValueError(
        "sees is 'all' and implementation 'edge_list'; want sees 'neighbours'"
      )

  @property
  def num_directions(self) -> int:
    """Returns 2 if reverse edges are added, otherwise 1."""
    return 2 if self.reverse_edges == "own_label" else 1

  @property
  def num_table_rows(self) -> int:
    """Returns the number of labels of edges, reverse edges and self-loops."""
    return self.num_edge_labels * self.num_directions + 1


class GraphBatch(NamedTuple):
  """Holds B graphs, padded with -1 to T nodes and M edges. Features are padded with 0.

  Attributes:
    nodes: the label of each node.
    node_features, edge_features: more features, of width 0 if there are none.
    senders, receivers: the indices of the two nodes of each edge.
    labels: the label of each edge; -1 for an edge without a label.
    query: the two nodes to classify, for head "pair"; otherwise -1.
    target: the class of each graph or query, [B], or of each node, [B, T].
  """

  nodes: Int[Array, "B T"]
  node_features: Float[Array, "B T features"]
  senders: Int[Array, "B M"]
  receivers: Int[Array, "B M"]
  labels: Int[Array, "B M"]
  edge_features: Float[Array, "B M F"]
  query: Int[Array, "B 2"]
  target: Int[Array, "B *T"]


class GraphEncoder(nnx.Module):
  """Maps graphs to logits for graphs, for nodes, or for pairs of nodes.

  Padding has no effect and gets no gradient. Permuting the nodes of a graph permutes
  their logits. Dropout is applied if `rngs` are given.

  >>> config = GraphEncoderConfig(num_node_labels=2, num_edge_labels=4, num_classes=6,
  ...                             head="pair", num_layers=1, width=16, num_heads=2)
  >>> graphs = GraphBatch(  # one graph of three nodes, and a pair to classify
  ...   nodes=jnp.zeros((1, 3), int), node_features=jnp.zeros((1, 3, 0)),
  ...   senders=jnp.array([[0, 1]]), receivers=jnp.array([[1, 2]]),
  ...   labels=jnp.array([[3, 0]]), edge_features=jnp.zeros((1, 2, 0)),
  ...   query=jnp.array([[0, 2]]), target=jnp.array([5]))
  >>> model = nnx.jit(lambda: GraphEncoder(config, rngs=nnx.Rngs(0)))()
  >>> nnx.jit(lambda model, graphs: model(graphs))(model, graphs).shape
  (1, 6)
  """

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embedding = _NodeEmbedding(config, rngs=rngs)
    self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])
    num_tables = config.num_layers if config.tables_per_layer else 1
    if not (config.relative_keys or config.relative_values):
      num_tables = 0
    self.tables = nnx.List([_EdgeTables(config, rngs=rngs) for _ in range(num_tables)])
    self.norm = last_norm(config, rngs)
    self.head = _Head(config, rngs=rngs)

  def __call__(
    self, graphs: GraphBatch, rngs: nnx.Rngs | None = None
  ) -> Float[Array, "B *T C"]:
    """Returns float32 logits: [B, C] for graphs or pairs, [B, T, C] for nodes."""
    x = self.embedding(graphs, rngs)
    options_of_layers = itertools.cycle(self._options(graphs))
    for layer, options in zip(self.layers, options_of_layers, strict=False):
      x = layer(x, rngs, **options)
    return self.head(self.norm(x), graphs, rngs)

  def _options(self, graphs: GraphBatch) -> list[dict]:
    """Returns the options of attention: one dict for all layers, or one per layer."""
    senders, receivers, labels, features = complete(graphs, self.config)
    if self.config.implementation == "edge_list":
      ends = dict(senders=senders, receivers=receivers)
      options = [ends | tables.edge_options(labels, features) for tables in self.tables]
      return options or [ends]
    is_node = graphs.nodes >= 0
    features, mask = pair_features(
      senders,
      receivers,
      labels,
      features,
      num_labels=self.config.num_table_rows,
      num_nodes=is_node.shape[1],
    )
    if self.config.sees == "all":
      mask = is_node[:, :, None] & is_node[:, None]
    relations = [tables.pair_relation(features) for tables in self.tables] or [None]
    return [dict(mask=mask[:, None], relations=relation) for relation in relations]


class _NodeEmbedding(nnx.Module):
  """Embeds nodes by their labels and features.

  For head "pair", it also adds one vector to the first node of the pair to classify,
  and another vector to the second.
  """

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    embed = functools.partial(
      nnx.Embed,
      features=config.width,
      embedding_init=jax.nn.initializers.normal(1.0),
      rngs=rngs,
    )
    self.table = embed(config.num_node_labels)
    if config.head == "pair":
      self.places = embed(2)
    if config.num_node_features:
      self.features = nnx.Linear(
        config.num_node_features, config.width, kernel_init=kernel_init, rngs=rngs
      )
    self.config = config

  def __call__(
    self, graphs: GraphBatch, rngs: nnx.Rngs | None = None
  ) -> Float[Array, "B T D"]:
    x = self.table(jnp.maximum(graphs.nodes, 0))
    if self.config.num_node_features:
      x += self.features(graphs.node_features)
    if self.config.head == "pair":
      is_asked = jax.nn.one_hot(graphs.query, x.shape[1], dtype=x.dtype)  # [B, 2, T]
      x += jnp.einsum("BPT,PD->BTD", is_asked, self.places.embedding[...])
    x = x.astype(self.config.dtype)
    return drop(x, self.config.embedding_dropout_rate, rngs)


class _EdgeTables(nnx.Module):
  """Owns the vectors of edge labels, and the matrices that project edge features.

  The vectors are [E, N, H] or [E, H], and the matrices [F, N, H] or [F, H].
  """

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    heads = (config.num_heads,) if config.tables_per_head else ()
    num_features = config.num_edge_features * config.num_directions

    def make(is_used: bool, rows: int) -> nnx.Param | None:
      if not is_used or not rows:
        return None
      shape = (rows, *heads, config.width // config.num_heads)
      return nnx.Param(init_table(rngs.params(), shape))

    self.key = make(config.relative_keys, config.num_table_rows)
    self.value = make(config.relative_values, config.num_table_rows)
    self.key_kernel = make(config.relative_keys, num_features)
    self.value_kernel = make(config.relative_values, num_features)
    self.dtype = config.dtype

  def edge_options(
    self, labels: Array, features: Array
  ) -> dict[str, EdgeLabels | EdgeFeatures]:
    """Returns the options `labels` and `features` for `edge_attention`."""
    tables = self._rows(self.key), self._rows(self.value)
    options: dict = dict(labels=EdgeLabels(labels, *tables))
    if features.shape[-1]:
      kernels = self._rows(self.key_kernel), self._rows(self.value_kernel)
      options["features"] = EdgeFeatures(features, *kernels)
    return options

  def pair_relation(self, features: Float[Array, "B T T R"]) -> EdgeFeatures:
    """Returns the relation for the features that `pair_features` returns.

    Their last axis has one column for each label, then the features of edges.
    """
    key = self._rows(self.key, self.key_kernel)
    value = self._rows(self.value, self.value_kernel)
    return EdgeFeatures(features, key, value)

  def _rows(self, *tables: nnx.Param | None) -> Array | None:
    """Concatenates the tables that are not None; returns None if all are."""
    parts = [table[...] for table in tables if table is not None]
    if not parts:
      return None
    return jnp.concatenate(parts).astype(self.dtype)


class _Head(nnx.Module):
  """Maps graphs, nodes or pairs of nodes to logits, with one hidden layer."""

  def __init__(self, config: GraphEncoderConfig, *, rngs: nnx.Rngs):
    linear = functools.partial(
      nnx.Linear, kernel_init=kernel_init, dtype=config.dtype, rngs=rngs
    )
    num_nodes = 2 if config.head == "pair" else 1
    self.hidden = linear(num_nodes * config.width, config.width)
    self.out = linear(config.width, config.num_classes)
    self.config = config

  def __call__(
    self, x: Array, graphs: GraphBatch, rngs: nnx.Rngs | None = None
  ) -> Float[Array, "B *T C"]:
    """Returns float32 logits."""
    if self.config.head == "pair":  # concatenates the two nodes of each query
      indices = jnp.maximum(graphs.query, 0)[..., None]
      x = jnp.take_along_axis(x, indices, axis=1).reshape(len(x), -1)
    elif self.config.head == "graph":  # padding, a graph without nodes, has mean 0
      is_node = graphs.nodes[:, :, None] >= 0
      sums = jnp.sum(x, 1, accumulation_dtype(x.dtype), where=is_node)
      if self.config.readout == "mean":
        sums /= jnp.maximum(is_node.sum(1), 1)
      x = sums.astype(x.dtype)
    hidden = jax.nn.relu(self.hidden(x))
    hidden = drop(hidden, self.config.dropout_rate, rngs)
    return self.out(hidden).astype(jnp.float32)


def complete(
  graphs: GraphBatch, config: GraphEncoderConfig
) -> tuple[Array, Array, Array, Array]:
  """Adds a self-loop to each node and, if the config says so, reverse edges.

  Returns the senders, receivers and labels of all edges, [B, X], and their features,
  [B, X, Y]. For M edges of T nodes with F features, X is M + T and Y is F. With reverse
  edges, X is 2 M + T and Y is 2 F. The label of a reverse edge is the label of the edge
  plus `num_edge_labels`. Self-loops have the last label.

  If several edges join the same pair, each of them gets the mean of their features. So
  the operator, which takes such a mean again, does not change it. With reverse edges
  there are two means, in separate columns: one over the edges of the graph, and one
  over the reverse edges.
  """
  num_edges = graphs.labels.shape[1]
  num_nodes = graphs.nodes.shape[1]
  node = jnp.where(graphs.nodes >= 0, jnp.arange(num_nodes), -1)
  own_label = jnp.full_like(node, config.num_table_rows - 1)
  edges = [(graphs.senders, graphs.receivers, graphs.labels), (node, node, own_label)]
  if config.num_directions == 2:
    labels = graphs.labels + config.num_edge_labels
    labels = jnp.where(graphs.labels >= 0, labels, -1)
    edges.append((graphs.receivers, graphs.senders, labels))
  parts = zip(*edges, strict=True)
  senders, receivers, labels = (jnp.concatenate(part, 1) for part in parts)

  # Sums features and their number for each pair, in each direction.
  count = jnp.ones((*graphs.labels.shape, 1))
  features = jnp.concatenate([graphs.edge_features, count], -1)
  shape = *senders.shape, config.num_directions, features.shape[-1]
  terms = jnp.zeros(shape).at[:, :num_edges, 0].set(features)
  if config.num_directions == 2:
    terms = terms.at[:, num_edges + num_nodes :, 1].set(features)
  terms = terms.reshape(*senders.shape, -1)
  pairs, _ = group_edges(senders, receivers)
  sums = jax.vmap(sum_groups)(terms, pairs).reshape(shape)
  means = sums[..., :-1] / jnp.maximum(sums[..., -1:], 1)
  return senders, receivers, labels, means.reshape(*senders.shape, -1)
