"""The laws of the operator, in float64, on random tables, for every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from relpos_jax import RelativePositions, attention_weights, dot_product_attention
from relpos_jax.attention.choice import IMPLEMENTATIONS

ALL = [*IMPLEMENTATIONS, None]
ANY_POSITIONS = ["reference", "per_position", "projected", None]  # the others need 0, 1, 2, ...
ANY_MASK = [name for name in ALL if not str(name).startswith("pallas")]  # and any bias
TOLERANCE = dict(rtol=0, atol=1e-10)
# Every example is a new shape: compiling is what takes the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@dataclasses.dataclass(frozen=True)
class Case:
  """Sizes and options of a call; its arrays follow from them."""

  batch: int = 2
  num_queries: int = 5
  num_keys: int = 5
  key_heads: int = 2
  group: int = 1
  width: int = 3
  k: int = 2
  per_head: bool = False
  keys: bool = True
  values: bool = True
  beyond: str = "clip"
  is_causal: bool = False
  masked: bool = False
  biased: bool = False
  positions: str = "default"
  segmented: bool = False
  seed: int = 0

  def arrays(self) -> dict:
    """What gradients are taken of."""
    random = np.random.default_rng(self.seed).normal
    heads = self.key_heads * self.group
    table = (2 * self.k + 1, *([heads] if self.per_head else []), self.width)
    arrays = dict(
      query=random(size=(self.batch, self.num_queries, heads, self.width)),
      key=random(size=(self.batch, self.num_keys, self.key_heads, self.width)),
      value=random(size=(self.batch, self.num_keys, self.key_heads, self.width)),
      key_table=random(size=table) if self.keys else None,
      value_table=random(size=table) if self.values else None,
      bias=random(size=(self.batch, 1, self.num_queries, self.num_keys)) if self.biased else None,
    )
    return {name: jnp.asarray(array) for name, array in arrays.items() if array is not None}

  def options(self) -> dict:
    """The other arguments of the operator."""
    random = np.random.default_rng(self.seed + 1)
    queries, keys = (self.batch, self.num_queries), (self.batch, self.num_keys)
    options = dict(is_causal=self.is_causal)
    if self.masked:
      options["mask"] = jnp.asarray(random.random((self.batch, 1, 1, self.num_keys)) < 0.7)
    if self.positions == "shifted":
      shift = jnp.asarray(random.integers(-50, 50, (self.batch, 1)))
      options["query_positions"] = shift + jnp.arange(self.num_queries)
      options["key_positions"] = shift + jnp.arange(self.num_keys)
    if self.positions == "random":
      options["query_positions"] = jnp.asarray(random.integers(-9, 9, queries))
      options["key_positions"] = jnp.asarray(random.integers(-9, 9, keys))
    if self.segmented:
      options["query_segment_ids"] = jnp.asarray(random.integers(0, 2, queries))
      options["key_segment_ids"] = jnp.asarray(random.integers(0, 2, keys))
    return options


CASES = st.builds(
  Case,
  batch=st.integers(1, 2),
  num_queries=st.integers(1, 9),
  num_keys=st.integers(1, 9),
  key_heads=st.integers(1, 2),
  group=st.integers(1, 2),
  width=st.integers(1, 4),
  k=st.integers(0, 12),
  per_head=st.booleans(),
  keys=st.booleans(),
  values=st.booleans(),
  beyond=st.sampled_from(["clip", "zero"]),
  is_causal=st.booleans(),
  masked=st.booleans(),
  biased=st.booleans(),
  positions=st.sampled_from(["default", "shifted", "random"]),
  segmented=st.booleans(),
  seed=st.integers(0, 99),
).filter(lambda case: case.keys or case.values)


def attend(arrays, options, beyond="clip", implementation=None, left=None):
  """The operator on named arrays, compiled."""
  dynamic, static = _split(options | dict(implementation=implementation))
  return _compiled(arrays, dynamic, beyond, left, static)


def gradients(loss, arrays, options, implementation):
  """Of a function of the output, which may be several numbers: one gradient each."""
  dynamic, static = _split(options | dict(implementation=implementation))

  @functools.partial(jax.jit, compiler_options=QUICK)
  def run(arrays, dynamic):
    call = lambda arrays: loss(_call(arrays, "clip", None, dynamic | dict(static)))
    return jax.jacrev(call)(arrays)

  return run(arrays, dynamic)


def _split(options):
  dynamic = {name: x for name, x in options.items() if isinstance(x, jax.Array)}
  return dynamic, tuple((name, x) for name, x in options.items() if name not in dynamic)


def _call(arrays, beyond, left, options):
  arrays = dict(arrays)
  tables = [arrays.pop(name, None) for name in ("key_table", "value_table")]
  relations = None
  if any(table is not None for table in tables):
    relations = RelativePositions(*tables, beyond=beyond, left=left)
  return dot_product_attention(**arrays, **options, relations=relations)


@functools.partial(jax.jit, static_argnums=(2, 3, 4), compiler_options=QUICK)
def _compiled(arrays, dynamic, beyond, left, static):
  return _call(arrays, beyond, left, dynamic | dict(static))


@functools.partial(jax.jit, static_argnums=(2, 3, 4), compiler_options=QUICK)
def _outputs_and_gradients(arrays, dynamic, beyond, static, implementations):
  results = {}
  for name in implementations:
    options = dynamic | dict(static, implementation=name)
    function = lambda arrays, options=options: _call(arrays, beyond, None, options)
    output, pull_back = jax.vjp(function, arrays)
    results[str(name)] = dict(output=output, **pull_back(_cotangent(output))[0])
  return results


def _cotangent(output):
  return jnp.asarray(np.random.default_rng(7).normal(size=output.shape))


def results_of(case, implementations, **more):
  """Of each implementation: the output, and the gradients for a random cotangent."""
  dynamic, static = _split(case.options() | more)
  arrays = case.arrays()
  return _outputs_and_gradients(arrays, dynamic, case.beyond, static, tuple(implementations))


def assert_close(actual: dict, wanted: dict, whose: str):
  assert actual.keys() == wanted.keys()
  for name in wanted:
    np.testing.assert_allclose(actual[name], wanted[name], **TOLERANCE, err_msg=f"{whose} {name}")


def equations(case: Case) -> np.ndarray:
  """Equations 3 and 4 of Shaw et al. 2018, one query and key at a time."""
  arrays, options = jax.tree.map(np.asarray, (case.arrays(), case.options()))
  query, key, value = (arrays[name] for name in ("query", "key", "value"))
  positions = [
    np.broadcast_to(options.get(name, np.arange(length)), (case.batch, length))
    for name, length in (("query_positions", case.num_queries), ("key_positions", case.num_keys))
  ]
  output = np.zeros(query.shape)
  for b, i, n in np.ndindex(query.shape[:3]):
    logits, vectors = [], []
    for j in range(case.num_keys):
      distance = positions[1][b, j] - positions[0][b, i]
      same = (
        not case.segmented or options["query_segment_ids"][b, i] == options["key_segment_ids"][b, j]
      )
      seen = not case.masked or options["mask"][b, 0, 0, j]
      if not same or not seen or (case.is_causal and distance > 0):
        continue
      a_key, a_value = (
        _row(arrays.get(name), case, distance, n) for name in ("key_table", "value_table")
      )
      logit = query[b, i, n] @ (key[b, j, n // case.group] + a_key) * case.width**-0.5
      logits.append(logit + (arrays["bias"][b, 0, i, j] if case.biased else 0))
      vectors.append(value[b, j, n // case.group] + a_value)
    if logits:
      weights = np.exp(np.array(logits) - max(logits))
      output[b, i, n] = weights @ np.array(vectors) / weights.sum()
  return output


def _row(table, case: Case, distance: int, head: int):
  if table is None or (case.beyond == "zero" and abs(distance) > case.k):
    return np.zeros(case.width)
  row = table[min(max(distance, -case.k), case.k) + case.k]
  return row[head] if case.per_head else row


# Law 1, and what `reference` itself rests on.
@pytest.mark.parametrize("positions", ["default", "shifted", "random"])
@settings(max_examples=6, phases=WITHOUT_SHRINKING)
@given(case=CASES)
def test_all_implementations_are_the_papers_equations(positions, case):
  case = dataclasses.replace(case, positions=positions)
  able = (ANY_MASK if case.biased else ALL) if positions == "default" else ANY_POSITIONS
  results = results_of(case, able)
  np.testing.assert_allclose(results["reference"]["output"], equations(case), **TOLERANCE)
  for name in able:
    assert_close(results[str(name)], results["reference"], str(name))


@pytest.mark.parametrize("implementation", ALL)
def test_tables_need_not_be_symmetric(implementation):
  case = Case(num_queries=7, num_keys=7)
  arrays = case.arrays()
  tables = np.random.default_rng(3).normal(size=(2, 4, case.width))  # rows -1 ... 2
  asymmetric = arrays | dict(key_table=jnp.asarray(tables[0]), value_table=jnp.asarray(tables[1]))
  widened = np.concatenate([tables[:, :1], tables], axis=1)  # rows -2 ... 2
  symmetric = arrays | dict(key_table=jnp.asarray(widened[0]), value_table=jnp.asarray(widened[1]))
  np.testing.assert_allclose(
    attend(asymmetric, {}, implementation=implementation, left=1),
    attend(symmetric, {}, implementation="reference"),
    **TOLERANCE,
  )


# Law 2.
@settings(max_examples=6, phases=WITHOUT_SHRINKING)
@given(case=CASES)
def test_without_relations_it_is_jax_nn(case):
  plain = dict(keys=False, values=False, segmented=False, masked=False, positions="default")
  case = dataclasses.replace(case, **plain)
  arrays = case.arrays()

  @functools.partial(jax.jit, compiler_options=QUICK)
  def wanted(arrays):
    call = functools.partial(jax.nn.dot_product_attention, is_causal=case.is_causal)
    output, pull_back = jax.vjp(lambda arrays: call(**arrays), arrays)
    return dict(output=output, **pull_back(_cotangent(output))[0])

  assert_close(results_of(case, [None])["None"], wanted(arrays), "without relations")


# Law 3.
@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("per_head", [True, False])
def test_k_0_adds_a_constant(implementation, per_head):
  case = Case(k=0, per_head=per_head, is_causal=True)
  arrays = case.arrays()
  plain = {name: x for name, x in arrays.items() if not name.endswith("table")}
  np.testing.assert_allclose(
    attend(arrays, case.options(), implementation=implementation),
    attend(plain, case.options()) + arrays["value_table"][0],
    atol=1e-6,  # jax.nn has its softmax in float32
  )


# Law 4.
@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_shifting_all_positions_changes_nothing(implementation, is_causal):
  case = Case(is_causal=is_causal, num_queries=6, num_keys=6)
  run = functools.partial(attend, case.arrays(), implementation=implementation)
  shifted = case.options() | dict(
    query_positions=jnp.arange(6) + 1000, key_positions=jnp.arange(6) + 1000
  )
  np.testing.assert_allclose(run(options=shifted), run(options=case.options()), **TOLERANCE)


@pytest.mark.parametrize("implementation", ANY_POSITIONS)
def test_permuting_tokens_with_their_positions_permutes_the_output(implementation):
  case = Case(num_queries=6, num_keys=6, is_causal=True)
  order = jnp.asarray(np.random.default_rng(0).permutation(6))
  arrays = case.arrays()
  permuted = arrays | {name: arrays[name][:, order] for name in ("query", "key", "value")}
  positions = case.options() | dict(query_positions=order, key_positions=order)
  np.testing.assert_allclose(
    attend(permuted, positions, implementation=implementation),
    attend(arrays, case.options(), implementation=implementation)[:, order],
    **TOLERANCE,
  )
  still = case.options() | dict(query_positions=jnp.arange(6), key_positions=jnp.arange(6))
  moved = attend(permuted, still, implementation=implementation)
  assert not np.allclose(moved, attend(permuted, positions, implementation=implementation))


# Law 5.
@pytest.mark.parametrize("implementation", ALL)
def test_no_gradient_flows_to_later_keys(implementation):
  case = Case(num_queries=6, num_keys=6, is_causal=True)
  each_query = lambda output: output.sum(axis=(0, 2, 3))
  grads = gradients(each_query, case.arrays(), case.options(), implementation)
  for i in range(6):
    for name in ("key", "value"):
      assert not grads[name][i, :, i + 1 :].any()
    assert grads["value"][i, :, : i + 1].all()
  for name in ("key_table", "value_table"):
    assert not grads[name][:, case.k + 1 :].any()


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("way", ["mask", "segments"])
def test_hidden_keys_have_no_effect_and_no_gradient(way, implementation, relative):
  case = Case(num_queries=4, num_keys=6, keys=relative, values=relative)
  hidden = jnp.arange(6) >= 4
  options = dict(mask=~hidden[None, None, None])
  if way == "segments":
    options = dict(query_segment_ids=jnp.zeros(4, int), key_segment_ids=hidden.astype(int))
  arrays = case.arrays()
  noisy = arrays | {
    name: jnp.where(hidden[:, None, None], 1e3, arrays[name]) for name in ("key", "value")
  }
  run = functools.partial(attend, options=options, implementation=implementation)
  np.testing.assert_array_equal(run(noisy), run(arrays))
  grads = gradients(lambda output: (output**2).sum(), noisy, options, implementation)
  assert not grads["key"][:, 4:].any() and not grads["value"][:, 4:].any()
  assert grads["value"][:, :4].all()


@pytest.mark.parametrize("implementation", ANY_MASK)
@pytest.mark.parametrize("relative", [True, False])
def test_a_query_that_sees_no_key_gives_zero_and_takes_no_gradient(implementation, relative):
  case = Case(keys=relative, values=relative, biased=True)
  sees = jnp.arange(case.num_queries) != 2
  options = dict(mask=sees[None, None, :, None])
  output = attend(case.arrays(), options, implementation=implementation)
  assert not output[:, 2].any() and output[:, sees].all()
  row = lambda output: output[:, 2].sum()
  grads = gradients(row, case.arrays(), options, implementation)
  assert not any(grad.any() for grad in grads.values())


# Law 6.
@pytest.mark.parametrize("implementation", ANY_POSITIONS)
@pytest.mark.parametrize("chunks", [(4, 1, 1), (1,) * 6, (2, 3, 1)])
def test_decoding_equals_the_full_pass(implementation, chunks):
  """Slots in any order, empty ones among them: only positions count."""
  case = Case(num_queries=6, num_keys=6, is_causal=True)
  arrays = case.arrays()
  whole = attend(arrays, case.options(), implementation=implementation)
  slots = jnp.asarray([7, 2, 0, 5, 3, 8])  # of nine, where each token is kept
  cache = {
    name: jnp.full((2, 9, 2, 3), 1e3).at[:, slots].set(arrays[name]) for name in ("key", "value")
  }
  positions = jnp.full(9, -1).at[slots].set(jnp.arange(6))
  start = 0
  for size in chunks:
    rows = slice(start, start + size)
    options = dict(
      is_causal=True,
      query_positions=jnp.arange(6)[rows],
      key_positions=positions,
      mask=(positions >= 0)[None, None, None],
    )
    part = arrays | cache | dict(query=arrays["query"][:, rows])
    np.testing.assert_allclose(
      attend(part, options, implementation=implementation), whole[:, rows], **TOLERANCE
    )
    start += size


# Law 7.
@pytest.mark.parametrize("implementation", ALL)
def test_clip_equals_zero_when_the_table_covers_the_sequence(implementation):
  case = Case(k=4, num_queries=5, num_keys=5)
  run = functools.partial(attend, case.arrays(), {}, implementation=implementation)
  np.testing.assert_allclose(run(beyond="clip"), run(beyond="zero"), **TOLERANCE)
  short = Case(k=3, num_queries=5, num_keys=5)
  run = functools.partial(attend, short.arrays(), {}, implementation=implementation)
  assert not np.allclose(run(beyond="clip"), run(beyond="zero"))


@pytest.mark.parametrize("implementation", ALL)
def test_a_clipped_table_equals_a_full_one_whose_end_rows_repeat(implementation):
  case = Case(k=2, num_queries=7, num_keys=7)
  arrays = case.arrays()
  full = arrays | {
    name: jnp.pad(arrays[name], ((4, 4), (0, 0)), mode="edge")
    for name in ("key_table", "value_table")
  }
  np.testing.assert_allclose(
    attend(arrays, {}, implementation=implementation),
    attend(full, {}, "zero", implementation),
    **TOLERANCE,
  )


# Law 9.
@pytest.mark.parametrize("implementation", ALL)
def test_positions_are_signed(implementation):
  case = Case(num_queries=6, num_keys=6)
  arrays = case.arrays()
  run = lambda arrays: attend(arrays, {}, implementation=implementation)
  sequence = {name: arrays[name][:, ::-1] for name in ("query", "key", "value")}
  tables = {name: arrays[name][::-1] for name in ("key_table", "value_table")}
  whole = run(arrays)
  np.testing.assert_allclose(run(arrays | sequence | tables)[:, ::-1], whole, **TOLERANCE)
  assert not np.allclose(run(arrays | sequence)[:, ::-1], whole)
  assert not np.allclose(run(arrays | tables), whole)


@pytest.mark.parametrize("implementation", ANY_MASK)
def test_without_a_batch(implementation):
  case = Case(batch=1, biased=True, is_causal=True)
  arrays = case.arrays()
  single = {name: x if name.endswith("table") else x[0] for name, x in arrays.items()}
  np.testing.assert_array_equal(
    attend(single, case.options(), implementation=implementation),
    attend(arrays, case.options(), implementation=implementation)[0],
  )


def test_weights_reproduce_the_output():
  case = Case(values=False, is_causal=True, masked=True, biased=True)
  arrays = case.arrays()
  relations = RelativePositions(arrays["key_table"], None)
  weights = attention_weights(
    arrays["query"], arrays["key"], arrays["bias"], relations=relations, **case.options()
  )
  output = jnp.einsum("BNTS,BSNH->BTNH", weights, arrays["value"])
  np.testing.assert_allclose(output, attend(arrays, case.options()), **TOLERANCE)


# Dropout.
@pytest.mark.parametrize("implementation", ALL)
def test_the_same_dropped_weights_feed_both_values(implementation):
  """With v_j = 0 and one shared row the output is the row times what is left of the weights."""
  case = Case(k=0, keys=False, num_keys=40)
  options = dict(dropout_rate=0.5, dropout_key=jax.random.key(0))
  arrays = case.arrays()
  table, ones = arrays["value_table"], jnp.ones_like(arrays["value"])
  zeros = jnp.zeros_like(ones)
  run = functools.partial(attend, options=options, implementation=implementation)
  from_table = run(arrays | dict(value=zeros))
  left_of_weights = run(arrays | dict(value=ones, value_table=jnp.zeros_like(table)))
  np.testing.assert_allclose(from_table, left_of_weights * table[0], **TOLERANCE)
  assert left_of_weights.std() > 0.01
  np.testing.assert_allclose(left_of_weights.mean(), 1, atol=0.2)


def test_dropout_is_the_same_in_every_implementation():
  case = Case(is_causal=True)
  results = results_of(case, ALL, dropout_rate=0.3, dropout_key=jax.random.key(1))
  for name in ALL:
    assert_close(results[str(name)], results["reference"], str(name))


def test_dropped_weights_are_the_weights_in_expectation():
  case = Case(is_causal=True)
  options = case.options()
  keys = jax.random.split(jax.random.key(0), 4000)
  drop = lambda key: _call(
    case.arrays(), "clip", None, options | dict(dropout_rate=0.2, dropout_key=key)
  )
  mean = jax.jit(lambda keys: jax.vmap(drop)(keys).mean(0))(keys)
  np.testing.assert_allclose(mean, attend(case.arrays(), options), atol=0.1)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -np.inf])
@pytest.mark.parametrize("name", ANY_MASK)
def test_a_bias_hides_as_a_mask_does(name, lowest):
  """Also where it hides all keys of a query."""
  arrays = Case(biased=True).arrays()
  hidden = np.zeros((2, 1, 5, 5), bool)
  hidden[:, :, 1] = hidden[0, 0, 2, 3] = True
  low = arrays | dict(bias=jnp.where(hidden, lowest, arrays["bias"]))
  run = lambda arrays, dynamic: _outputs_and_gradients(arrays, dynamic, "clip", (), (name,))[
    str(name)
  ]
  biased, masked = run(low, {}), run(arrays, dict(mask=jnp.asarray(~hidden)))
  assert_close(biased, masked, str(name))
  assert not biased["output"][:, 1].any()
