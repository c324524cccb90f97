"""Beam search against a search of lists and loops, and its own promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from numpy.testing import assert_allclose, assert_array_equal

from relpos_jax.decoding import beam
from relpos_jax.decoding.beam import beam_search

PAD, BOS, EOS = 0, 1, 2
TOKENS = {"bos": BOS, "eos": EOS, "pad": PAD}


class RememberingModel:
  """Logits depend on the order of all tokens, so a beam with another's cache shows."""

  def __init__(self, seed, vocabulary=5, spread=1.5):
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    self.embeddings = np.asarray(jax.random.normal(first, (vocabulary, 8)))
    self.recurrence = np.asarray(0.9 * jax.random.orthogonal(second, 8))
    self.output = np.asarray(spread * jax.random.normal(third, (8, vocabulary)))

  def cache(self, num_sentences):
    start = jax.random.normal(jax.random.key(0), (num_sentences, 8))
    return {"state": start, "counts": [jnp.zeros(num_sentences, jnp.int32)]}

  def decode(self, tokens, cache):
    embeddings = jnp.asarray(self.embeddings)[tokens]
    state = jnp.tanh(cache["state"] @ self.recurrence + embeddings)
    return state @ self.output, {"state": state, "counts": [cache["counts"][0] + 1]}

  def extend(self, tokens, state):
    """Returns the log-probabilities of the next tokens, and the state, without JAX."""
    state = np.tanh(state @ self.recurrence + self.embeddings[tokens])
    return scipy.special.log_softmax(state @ self.output, axis=-1), state


def repeat(cache, beam_size):
  return jax.tree.map(lambda x: jnp.repeat(x[:, None], beam_size, axis=1), cache)


def make_search(model, beam_size, **options):
  """Returns the compiled search of a cache and the limits of its sentences."""
  search = functools.partial(
    beam_search, model.decode, beam_size=beam_size, **TOKENS, **options
  )

  @jax.jit
  def run(cache, limits):
    return search(repeat(cache, beam_size), length_limits=limits)

  return run


def take(tree, rows):
  return jax.tree.map(lambda x: x[np.asarray(rows)], tree)


def penalty(length, alpha):
  return ((5 + length) / 6) ** alpha


def extend(model, live, state):
  """Returns all (log-probability, tokens, parent) with one more token, best first."""
  last = [tokens[-1] if tokens else BOS for _, tokens in live]
  log_probs, state = model.extend(last, state)
  extensions = []
  for parent, (log_prob, tokens) in enumerate(live):
    for token, new in enumerate(log_probs[parent]):
      if token != PAD:
        extensions.append((log_prob + new, [*tokens, token], parent))
  return sorted(extensions, reverse=True), state


def promising(live, ended, beam_size, at_limit, at_present):
  """Drops hypotheses that cannot win: see `search_by_lists`."""
  if ended:
    live = [x for x in live if x[0] / at_limit > ended[0][0]]
  if len(ended) >= beam_size:
    live = [x for x in live if x[0] / at_present > ended[beam_size - 1][0]]
  return live


def search_by_lists(model, state, limit, beam_size, alpha, stop="bound"):
  """Searches one sentence with lists and loops: (score, tokens), best first.

  For "bound" it goes on to the limit. For "present" it drops hypotheses that cannot
  beat the best that ended even at the limit, or that at their length are no better than
  the W-th best.
  """
  live, ended = [(0.0, [])], []
  num_extensions = 1 if beam_size == 1 else 2 * beam_size
  for step in range(limit):
    extensions, state = extend(model, live, state)
    best = []
    for log_prob, tokens, parent in extensions[:num_extensions]:
      if EOS in tokens:
        ended.append((log_prob / penalty(len(tokens), alpha), tokens))
      else:
        best.append((log_prob, tokens, parent))
    ended.sort(reverse=True)
    best = best[:beam_size]
    if stop == "present":
      penalties = penalty(limit, alpha), penalty(step + 1, alpha)
      best = promising(best, ended, beam_size, *penalties)
    if not best:
      return ended
    log_probs, hypotheses, parents = zip(*best, strict=True)
    live = list(zip(log_probs, hypotheses, strict=True))
    state = state[list(parents)]
  return ended or [(x / penalty(limit, alpha), tokens) for x, tokens in live]


@pytest.mark.parametrize(
  "beam_size, alpha", [(1, 0.6), (2, 0.0), (2, 3.0), (4, 0.6), (81, 2.0)]
)
@pytest.mark.parametrize("stop", ["bound", "present"])
def test_stopping_early_loses_nothing_of_a_search_by_lists(stop, beam_size, alpha):
  """Compares the best hypothesis, and all of a search at the present length."""
  model = RememberingModel(3, vocabulary=9, spread=0.7)
  cache, limits = model.cache(6), [0, 1, 2, 5, 9, 9]
  options = {"max_length": 9, "length_penalty": alpha, "stop": stop}
  search = make_search(model, beam_size, **options)
  tokens, scores = map(np.asarray, search(cache, jnp.asarray(limits)))
  assert scores.dtype == np.float32
  assert np.all(tokens[0] == PAD)
  assert np.all(scores[0] == -np.inf)
  number = beam_size if stop == "present" else 1
  for i, limit in enumerate(limits[1:], start=1):
    one = np.asarray(cache["state"])[[i]]
    expected = search_by_lists(model, one, limit, beam_size, alpha, stop)[:number]
    for n, (score, hypothesis) in enumerate(expected):
      padding = [PAD] * (9 - len(hypothesis))
      assert tokens[i, n].tolist() == hypothesis + padding
      assert_allclose(scores[i, n], score, rtol=1e-5)
    assert np.all(scores[i, len(expected) : number] == -np.inf)


def count_steps(decode, cache, **options):
  """Returns the tokens of a search, and how often it decodes."""
  steps = []

  def count_and_decode(tokens, cache):
    jax.debug.callback(lambda: steps.append(1))
    return decode(tokens, cache)

  options |= {"beam_size": 4} | TOKENS
  tokens, _ = beam_search(count_and_decode, cache, **options)
  jax.effects_barrier()
  return tokens, len(steps)


def test_the_search_at_the_present_length_takes_fewer_steps():
  model = RememberingModel(3, 9, 0.7)
  cache = repeat(model.cache(8), 4)
  options = {"max_length": 50, "length_limits": jnp.full(8, 50)}
  _, present = count_steps(model.decode, cache, **options, stop="present")
  _, bound = count_steps(model.decode, cache, **options, stop="bound")
  assert 0 < present < bound


def test_the_search_stops_when_every_sentence_is_decided():
  def decode(tokens, cache):
    logits = jnp.full((*tokens.shape, 6), -9.0).at[..., 5].set(9.0)
    of_end = jnp.where(cache["left"] == 0, 20.0, -20.0)
    return logits.at[..., EOS].set(of_end), {"left": cache["left"] - 1}

  cache = {"left": jnp.array([[3] * 4, [6] * 4])}
  options = {"max_length": 100, "length_limits": jnp.full(2, 100)}
  tokens, num_steps = count_steps(decode, cache, **options)
  best = tokens[:, 0, :8].tolist()
  assert best[0] == [5, 5, 5, EOS, PAD, PAD, PAD, PAD]
  assert best[1] == [5, 5, 5, 5, 5, 5, EOS, PAD]
  assert num_steps == 7


@pytest.fixture(scope="module")
def searched():
  """Searches sixteen sentences with limits 0 to 15, by beams of four."""
  model, limits = RememberingModel(5, vocabulary=20), np.arange(16)
  cache = model.cache(16)
  search = make_search(model, 4, max_length=15)
  return model, cache, limits, search, *map(np.asarray, search(cache, limits))


def test_a_sentence_is_translated_alone_as_in_any_company(searched):
  _, cache, limits, search, tokens, scores = searched
  with_repeats = np.array([15, 8, 2, 2, 0, *range(5, 16)])
  for company in [[9], with_repeats]:
    other_tokens, other_scores = search(take(cache, company), limits[company])
    assert_array_equal(other_tokens, tokens[company])
    assert_allclose(other_scores, scores[company], rtol=1e-5)


def test_the_static_length_is_only_room(searched):
  model, cache, limits, search, tokens, scores = searched
  long_search = make_search(model, tokens.shape[1], max_length=40)
  long_tokens, long_scores = long_search(cache, limits)
  assert_array_equal(long_tokens[:, :, :15], tokens)
  assert_allclose(long_scores, scores, rtol=1e-6)
  assert np.all(long_tokens[:, :, 15:] == PAD)
  limitless, _ = search(cache, limits + 100)
  assert_array_equal(limitless[15], tokens[15])


def test_each_device_may_search_for_its_own_sentences(searched):
  _, cache, limits, search, tokens, scores = searched
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = {"in_specs": jax.P("data"), "out_specs": jax.P("data")}
  on_each = jax.shard_map(search, mesh=mesh, **specs, check_vma=False)
  sharded_tokens, sharded_scores = jax.jit(on_each)(cache, limits)
  assert_array_equal(sharded_tokens, tokens)
  assert_allclose(sharded_scores, scores, rtol=1e-5)


def test_scores_are_summed_in_float32():
  def decode(tokens, cache):
    return jnp.zeros((*tokens.shape, 3), jnp.bfloat16), cache

  options = {"beam_size": 1, "max_length": 200, "length_penalty": 0.0}
  without_end = TOKENS | {"eos": 11}
  limits = jnp.array([200])
  _, scores = beam_search(decode, (), length_limits=limits, **options, **without_end)
  assert_allclose(scores, -200 * np.log(3), rtol=1e-5)


@pytest.mark.parametrize(
  "vocabulary, pad", [(300, 0), (300, 299), (307, 306), (256, 130), (11, 3)]
)
def test_the_best_of_large_vocabularies_and_of_equals_the_first(vocabulary, pad):
  """Extends by two tokens: many logits are equal, those of the end and padding high."""
  random, eos = np.random.default_rng(vocabulary + pad), vocabulary // 2
  logits = np.round(2 * random.normal(size=(vocabulary, vocabulary)))
  logits[:, -1] = 9.0  # the last token of the vocabulary's last block
  logits[:, eos] = 10.0
  logits[:, pad] = 11.0
  log_probs = np.array(jax.nn.log_softmax(jnp.float32(logits)))
  log_probs[:, [eos, pad]] = -np.inf

  def best(scores):
    return np.argsort(-np.round(scores.ravel(), 4), stable=True)[:4]

  firsts = best(log_probs[1])
  pairs = best(log_probs[1, firsts][:, None] + log_probs[firsts])
  beams, seconds = np.divmod(pairs, vocabulary)

  def decode(tokens, cache):
    return jnp.float32(logits)[tokens], cache

  options = {"beam_size": 4, "max_length": 99, "bos": 1, "pad": pad}
  search = beam.begin((), jnp.array([99]), **options)
  extend = functools.partial(
    beam.extend, decode=decode, length_penalty=9.0, eos=eos, pad=pad
  )
  step = jax.jit(extend)
  search = step(step(search))
  wanted = np.stack([firsts[beams], seconds], axis=1)
  assert_array_equal(search.live.tokens[0, :, 1:3], wanted)


@pytest.mark.parametrize("beam_size", [1, 2])
def test_logits_that_are_nan_show_in_the_score(beam_size):
  def decode(tokens, cache):
    return jnp.full((*tokens.shape, 6), jnp.nan), cache

  options = {"beam_size": beam_size, "max_length": 4, "bos": 1, "eos": 5, "pad": 0}
  _, scores = beam_search(decode, (), length_limits=jnp.array([4]), **options)
  assert np.isnan(scores[0, 0])
