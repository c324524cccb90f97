"""Labelled and featured edges, as lists and as matrices of pairs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import fusing, quickly, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_jax import EdgeFeatures, EdgeLabels, dot_product_attention, edge_attention

pytestmark = pytest.mark.usefixtures("float64")

E, F, M = 3, 2, 24  # labels, features, edges of each graph


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed + len(shape)).normal(size=shape))


def random_edges(num_nodes, num_senders, batch=(), seed=0):
  """Edges, some of them twice or with several labels, to themselves, or padding."""
  random = np.random.default_rng(seed)
  senders = random.integers(-1, num_senders, (*batch, M))
  receivers = random.integers(-1, num_nodes, (*batch, M))
  receivers[receivers == 1] = 0  # node 1 receives no edge
  return senders, receivers, random.integers(-1, E, (*batch, M))


def matrix(senders, receivers, labels, features, shape):
  """Builds the features of each pair, edge by edge, and the mask."""
  pairs, visible = np.zeros((*shape, E + F)), np.zeros(shape, bool)
  edges = {}
  for s, r, label, x in zip(senders, receivers, labels, features, strict=True):
    if s >= 0 and r >= 0:
      visible[r, s] = True
      pairs[r, s, label] = 1 if label >= 0 else pairs[r, s, label]
      edges.setdefault((r, s), []).append(x)
  for pair, xs in edges.items():
    pairs[pair][E:] = np.mean(xs, axis=0)
  return pairs, visible


def assert_equal(actual, wanted):
  for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-10)


def arrays_of(
  num_nodes, num_senders, batch=(), heads=4, key_heads=2, tables=(), width=3
):
  return dict(
    query=normal(*batch, num_nodes, heads, width),
    key=normal(*batch, num_senders, key_heads, width, seed=1),
    value=normal(*batch, num_senders, key_heads, width + 1, seed=2),
    key_table=normal(E + F, *tables, width, seed=3),
    value_table=normal(E + F, *tables, width + 1, seed=4),
  )


def test_traced_labels_are_clamped_and_of_any_integer_type():
  query, key, value, *_ = arrays_of(6, 7, (2,)).values()
  table = normal(300, 3)  # has rows that labels of 8 bits do not reach
  labels = 60 + jnp.arange(6 * 7).reshape(6, 7)

  @quickly
  def run(labels):
    return dot_product_attention(
      query, key, value, relations=EdgeLabels(labels, table, None)
    )

  assert_equal(run(labels.at[0].set(999)), run(labels.at[0].set(299)))
  for dtype in (jnp.uint8, jnp.int8):
    assert_equal(run(labels.astype(dtype)), run(labels))


@pytest.mark.parametrize(
  "terms, batch, tables",
  [("both", (2,), (4,)), ("keys", (), (4,)), ("values", (2,), ())],
)
def test_a_list_of_edges_is_the_operator_on_the_matrix_of_pairs(terms, batch, tables):
  senders, receivers, labels = random_edges(5, 6, batch)
  features = normal(*batch, M, F)
  edges = senders, receivers, labels, features
  of_graph = lambda index: matrix(*(x[index] for x in edges), (5, 6))
  graphs = [of_graph(index) for index in range(2)] if batch else [of_graph(...)]
  pairs, visible = (
    np.reshape(x, (*batch, *x[0].shape)) for x in zip(*graphs, strict=True)
  )
  keep = lambda table, name: table if terms in ("both", name) else [None] * len(table)

  def by_list(query, key, value, key_table, value_table):
    a, b = keep((key_table[:E], key_table[E:]), "keys")
    c, d = keep((value_table[:E], value_table[E:]), "values")
    relations = dict(
      labels=EdgeLabels(labels, a, c), features=EdgeFeatures(features, b, d)
    )
    return edge_attention(query, key, value, senders, receivers, **relations)

  def by_matrix(query, key, value, key_table, value_table):
    (key_table,), (value_table,) = (
      keep([key_table], "keys"),
      keep([value_table], "values"),
    )
    relations = EdgeFeatures(jnp.asarray(pairs), key_table, value_table)
    mask = jnp.asarray(visible)[..., None, :, :]
    return dot_product_attention(
      query, key, value, mask=mask, relations=relations, implementation="reference"
    )

  arrays = arrays_of(5, 6, batch, tables=tables)
  both = (lambda arrays, call=call: call(**arrays) for call in (by_list, by_matrix))
  assert_equal(
    *(quickly(functools.partial(with_gradients, call))(arrays) for call in both)
  )


@quickly
def run(nodes, senders, receivers, labels):
  """Returns the output and gradients of four nodes and up to 8 edges."""
  tables = [arrays_of(4, 4)[f"{name}_table"] for name in ("key", "value")]
  relation = EdgeLabels(labels, *tables)
  call = lambda *nodes: edge_attention(*nodes, senders, receivers, labels=relation)
  return with_gradients(call, *nodes)


def small(edges, nodes=None):
  """Returns the output, and the gradients of query, key and value."""
  padded = np.full((8, 3), -1)
  padded[: len(edges)] = np.reshape(edges, (-1, 3))
  return run(nodes_of_four() if nodes is None else nodes, *padded.T)


def nodes_of_four():
  return [arrays_of(4, 4)[name] for name in ("query", "key", "value")]


EDGES = [
  (0, 1, 2),
  (2, 1, 0),
  (0, 1, 1),
  (3, 3, 1),
  (1, 0, 2),
]  # sender, receiver, label


def test_traced_nodes_out_of_range_are_padding():
  assert_equal(small([*EDGES, (4, 0, 1), (0, 4, 1), (-2, 0, 1)]), small(EDGES))


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_edges_does_not_matter_and_renumbering_nodes_renumbers_all(seed):
  random = np.random.default_rng(seed)
  edges = np.stack([*random.integers(0, 4, (2, 8)), random.integers(-1, E, 8)], 1)
  output, gradients = small(edges)
  assert_equal(small(random.permutation(edges)), (output, gradients))
  old = random.permutation(4)
  new = np.argsort(old)
  renumbered = np.stack([new[edges[:, 0]], new[edges[:, 1]], edges[:, 2]], 1)
  found = small(renumbered, [x[old] for x in nodes_of_four()])
  assert_equal(found, jax.tree.map(lambda x: x[old], (output, gradients)))


def test_dropout_keeps_the_mean_and_drops_a_pair_as_one():
  """Uses ones as values, so a pair adds 1 or 12 in total, or is dropped."""
  senders, receivers = np.array([0, 0, 1]), np.array([0, 0, 0])
  ones = jnp.ones((2, 1, 1))
  labels = EdgeLabels(np.array([0, 1, -1]), None, jnp.array([[1.0], [10.0]]))
  call = quickly(
    jax.vmap(
      lambda key: edge_attention(
        ones,
        ones,
        ones,
        senders,
        receivers,
        labels=labels,
        dropout_rate=0.5,
        dropout_key=key,
      )[0, 0, 0]
    )
  )
  found = call(jax.random.split(jax.random.key(0), 4000))
  np.testing.assert_allclose(np.unique(np.round(found, 6)), [0, 1, 12, 13])
  assert abs(found.mean() - 6.5) < 0.5


def test_bfloat16_sums_in_float32():
  """Averages thousands of numbers: a sum of ones in bfloat16 ends at 256."""
  number = 4096
  senders, receivers = np.arange(number), np.zeros(number, int)
  ones = jnp.ones((number, 1, 1), jnp.bfloat16)
  value = ones.at[: number // 2].set(0)
  output = quickly(edge_attention)(ones, ones, value, senders, receivers)
  assert output.dtype == jnp.bfloat16 and output[0, 0, 0] == 0.5


def test_known_edges_are_sorted_before_anything_is_compiled():
  """Checks the program, because XLA takes minutes to fold a sort of constants."""
  senders, receivers = np.random.default_rng(0).integers(0, 9, (2, 1000))
  tokens, table = jnp.ones((9, 1, 1)), jnp.ones((9, 1))

  def call(tokens, table, senders, receivers):
    labels = EdgeLabels(receivers, table, table)
    return edge_attention(tokens, tokens, tokens, senders, receivers, labels=labels)

  known = jax.jit(lambda tokens, table: call(tokens, table, senders, receivers))
  assert "stablehlo.sort" not in known.lower(tokens, table).as_text()
  assert (
    "stablehlo.sort" in jax.jit(call).lower(tokens, table, senders, receivers).as_text()
  )


def temporary_bytes(num_edges, num_nodes):
  tokens = jax.ShapeDtypeStruct((num_nodes, 4, 8), jnp.float32)
  of_edges = jax.ShapeDtypeStruct((num_edges,), jnp.int32)
  table = jax.ShapeDtypeStruct((5, 8), jnp.float32)

  def loss(tokens, table, senders, receivers, labels):
    labels = EdgeLabels(labels, table, table)
    return edge_attention(
      tokens, tokens, tokens, senders, receivers, labels=labels
    ).sum()

  compiled = fusing(jax.grad(loss, argnums=(0, 1))).lower(
    tokens, table, *[of_edges] * 3
  ).compile()  # fmt: skip
  assert not re.search(
    rf"\[(.*,)?{num_nodes},(.*,)?{num_nodes}[,\]]", compiled.as_text()
  )
  return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_edges_and_never_with_the_pairs():
  once, twice = temporary_bytes(20_000, 3_000), temporary_bytes(40_000, 3_000)
  assert 1.5 < twice / once < 2.1
  assert twice < 3_000**2 * 4 * 4  # the logits of all pairs


def test_no_edge_at_all_gives_zeros():
  tokens, none = np.ones((4, 2, 3)), np.zeros(0, int)
  assert (edge_attention(tokens, tokens, tokens, none, none) == 0).all()
