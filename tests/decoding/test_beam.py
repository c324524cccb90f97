"""Beam search against a search of lists and loops, and its own promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relpos_jax.decoding import beam
from relpos_jax.decoding.beam import beam_search

PAD, BOS, EOS = 0, 1, 2


class RememberingModel:
  """Logits depend on the order of all tokens so far, so a beam with another's cache shows."""

  def __init__(self, seed, vocabulary=5, spread=1.5):
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    self.embeddings = jax.random.normal(first, (vocabulary, 8))
    self.recurrence = 0.9 * jax.random.orthogonal(second, 8)
    self.output = spread * jax.random.normal(third, (8, vocabulary))

  def cache(self, num_sentences):
    start = jax.random.normal(jax.random.key(0), (num_sentences, 8))
    return {"state": start, "counts": [jnp.zeros(num_sentences, jnp.int32)]}

  def decode(self, tokens, cache):
    state = jnp.tanh(cache["state"] @ self.recurrence + self.embeddings[tokens])
    return state @ self.output, {"state": state, "counts": [cache["counts"][0] + 1]}


def searcher(model, **options):
  run = functools.partial(
    beam_search, model.decode, bos=BOS, eos=EOS, pad=PAD, **options
  )

  @jax.jit
  def find(cache, limits):
    cache = jax.tree.map(
      lambda x: jnp.repeat(x[:, None], options["beam_size"], axis=1), cache
    )
    return run(cache, length_limits=limits)

  return find


def search(model, cache, limits, **options):
  return jax.tree.map(
    np.asarray, searcher(model, **options)(cache, jnp.asarray(limits))
  )


def rows(tree, indices):
  return jax.tree.map(lambda x: x[np.asarray(indices)], tree)


def penalty(length, alpha):
  return ((5 + length) / 6) ** alpha


def textbook(model, cache, limit, beam_size, alpha, stop="bound"):
  """Searches one sentence with lists and loops: (score, tokens), best first.

  For "bound" it goes on to the limit. For "present" it drops hypotheses that cannot
  beat the best that ended even at the limit, or that at their length are no better than
  the W-th best.
  """
  live, ended = [(0.0, [])], []
  for step in range(limit):
    last = [tokens[-1] if tokens else BOS for _, tokens in live]
    logits, cache = model.decode(jnp.array(last), cache)
    extensions = [
      (log_prob + new, [*tokens, token], parent)
      for parent, (log_prob, tokens) in enumerate(live)
      for token, new in enumerate(np.asarray(jax.nn.log_softmax(logits[parent])))
      if token != PAD
    ]
    best = sorted(extensions, reverse=True)[: 2 * beam_size if beam_size > 1 else 1]
    for x, tokens, _ in best:
      ended += [(x / penalty(len(tokens), alpha), tokens)] * (EOS in tokens)
    best = [x for x in best if EOS not in x[1]][:beam_size]
    ended.sort(reverse=True)
    if stop == "present" and ended:
      best = [x for x in best if x[0] / penalty(limit, alpha) > ended[0][0]]
    if stop == "present" and len(ended) >= beam_size:
      best = [
        x for x in best if x[0] / penalty(step + 1, alpha) > ended[beam_size - 1][0]
      ]
    if not best:
      break
    live = [(log_prob, tokens) for log_prob, tokens, _ in best]
    cache = rows(cache, [parent for *_, parent in best])
  return sorted(ended, reverse=True) or [
    (x / penalty(limit, alpha), tokens) for x, tokens in live
  ]


@pytest.mark.parametrize(
  "beam_size, alpha", [(1, 0.6), (2, 0.0), (2, 3.0), (3, 1.0), (4, 0.6), (81, 2.0)]
)
@pytest.mark.parametrize("stop", ["bound", "present"])
def test_stopping_early_loses_nothing_of_the_textbook(stop, beam_size, alpha):
  """Compares the best hypothesis, and all of a search at the present length."""
  model, limits = (
    RememberingModel(3, vocabulary=9, spread=0.7),
    [0, 1, 2, 5, 9, 9, 9, 9],
  )
  cache, options = model.cache(8), dict(beam_size=beam_size, length_penalty=alpha)
  tokens, scores = search(model, cache, limits, max_length=9, stop=stop, **options)
  number = beam_size if stop == "present" else 1
  assert (
    np.all(tokens[0] == PAD)
    and np.all(scores[0] == -np.inf)
    and scores.dtype == np.float32
  )
  for i, limit in enumerate(limits[1:], start=1):
    expected = textbook(model, rows(cache, [i]), limit, beam_size, alpha, stop)[:number]
    assert tokens[i, : len(expected)].tolist() == [
      x + [PAD] * (9 - len(x)) for _, x in expected
    ]
    np.testing.assert_allclose(
      scores[i, : len(expected)], [x for x, _ in expected], rtol=1e-5
    )
    assert np.all(scores[i, len(expected) : number] == -np.inf)


def test_the_search_at_the_present_length_takes_fewer_steps():
  model, beam_size = RememberingModel(3, vocabulary=9, spread=0.7), 4
  cache = jax.tree.map(
    lambda x: jnp.repeat(x[:, None], beam_size, axis=1), model.cache(8)
  )
  first = beam.begin(
    cache, jnp.full(8, 50), beam_size=beam_size, max_length=50, bos=BOS, pad=PAD
  )

  def steps(stop):
    extend = functools.partial(
      beam.extend, decode=model.decode, stop=stop, eos=EOS, pad=PAD
    )
    return jax.lax.while_loop(
      lambda search: search.is_live.any(), extend, first
    ).length.sum()

  assert 0 < steps("present") < steps("bound")


def test_the_search_stops_when_every_sentence_is_decided():
  steps = []

  def decode(tokens, cache):
    jax.debug.callback(lambda: steps.append(1))
    logits = jnp.full((*tokens.shape, 6), -9.0).at[..., 5].set(9.0)
    ending = cache["left"] == 0
    return logits.at[..., EOS].set(jnp.where(ending, 20.0, -20.0)), {
      "left": cache["left"] - 1
    }

  tokens, _ = beam_search(
    decode, {"left": jnp.array([[3] * 4, [6] * 4])}, beam_size=4, max_length=100,
    length_limits=jnp.array([100, 100]), bos=BOS, eos=EOS, pad=PAD,
  )  # fmt: skip
  jax.effects_barrier()
  assert tokens[:, 0, :8].tolist() == [
    [5] * 3 + [EOS] + [PAD] * 4,
    [5] * 6 + [EOS, PAD],
  ]
  assert len(steps) == 7


@pytest.fixture(scope="module", params=[1, 4], ids=["greedy", "beam4"])
def found(request):
  """Searches sixteen sentences with limits 0 to 15."""
  model, limits = RememberingModel(5, vocabulary=20), np.arange(16)
  cache = model.cache(16)
  find = searcher(model, beam_size=request.param, max_length=15)
  return model, cache, limits, find, *jax.tree.map(np.asarray, find(cache, limits))


def test_a_sentence_is_translated_alone_as_in_any_company(found):
  _, cache, limits, find, tokens, scores = found
  for company in [[9], [15, 8, 2, 2, 0], np.random.default_rng(0).permutation(16)]:
    other_tokens, other_scores = find(rows(cache, company), limits[company])
    np.testing.assert_array_equal(other_tokens, tokens[company])
    np.testing.assert_allclose(other_scores, scores[company], rtol=1e-5)


def test_the_static_length_is_only_room(found):
  model, cache, limits, find, tokens, scores = found
  wide_tokens, wide_scores = search(
    model, cache, limits, beam_size=tokens.shape[1], max_length=40
  )
  np.testing.assert_array_equal(wide_tokens[:, :, :15], tokens)
  np.testing.assert_allclose(wide_scores, scores, rtol=1e-6)
  assert np.all(wide_tokens[:, :, 15:] == PAD)
  limitless, _ = find(cache, limits + 100)
  np.testing.assert_array_equal(limitless[15], tokens[15])


def test_each_device_may_search_for_its_own_sentences(found):
  _, cache, limits, find, tokens, scores = found
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  batch = jax.P("data")
  on_each = jax.shard_map(
    find, mesh=mesh, in_specs=batch, out_specs=batch, check_vma=False
  )
  sharded_tokens, sharded_scores = jax.jit(on_each)(cache, limits)
  np.testing.assert_array_equal(sharded_tokens, tokens)
  np.testing.assert_allclose(sharded_scores, scores, rtol=1e-5)


def test_scores_are_summed_in_float32():
  def decode(tokens, cache):
    return jnp.zeros((*tokens.shape, 3), jnp.bfloat16), cache

  options = dict(
    beam_size=1, max_length=200, length_penalty=0.0, bos=BOS, eos=11, pad=PAD
  )
  _, scores = beam_search(decode, (), length_limits=jnp.array([200]), **options)
  np.testing.assert_allclose(scores, -200 * np.log(3), rtol=1e-5)


@pytest.mark.parametrize(
  "vocabulary, pad", [(300, 0), (300, 299), (307, 306), (256, 130), (7, 3)]
)
def test_the_best_of_blocks_are_the_best_of_all_and_of_equals_the_first(
  vocabulary, pad
):
  first, second = jax.random.split(jax.random.key(vocabulary + pad))
  logits = jnp.round(2 * jax.random.normal(first, (3, 4, vocabulary)))  # many are equal
  scores = jnp.round(jax.random.normal(second, (3, 4))).at[1, 2].set(-jnp.inf)
  found, beams, words = beam._best(logits, scores, 8, pad)
  sums = jax.nn.log_softmax(logits).at[..., pad].set(-jnp.inf) + scores[..., None]
  sums = sums.astype(jnp.float32).reshape(3, -1)
  expected, places = jax.lax.top_k(jnp.round(sums, 4), 8)
  np.testing.assert_allclose(found, expected, atol=1e-4)
  np.testing.assert_array_equal(beams * vocabulary + words, places)
