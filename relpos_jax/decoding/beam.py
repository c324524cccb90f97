"""Beam search, for any step-wise decoder with a cache.

As in Tensor2Tensor, every step computes the 2W most probable extensions of the W live
hypotheses. It stores the extensions that end, with their final scores, and continues
with the W best of the others. If W is 1, it computes only the most probable extension,
which is greedy decoding.

`beam_search` returns when all sentences of a batch are done. To replace each sentence
as soon as it is done, call `begin`, and then `extend` in a loop of your own.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int, PyTree

# The score of a missing hypothesis. It loses every comparison, and adding
# log-probabilities does not change it.
_NONE = -jnp.inf
# The search for the best tokens splits the vocabulary into blocks. Their size is the
# first of these that divides the vocabulary. If none does, the logits are padded, which
# copies them.
_BLOCKS = range(128, 15, -1)

# Maps the latest tokens [B, W] and the cache to the logits of the next tokens
# [B, W, V] and the new cache.
Decode = Callable[[Array, PyTree], tuple[Array, PyTree]]


class Hypotheses(NamedTuple):
  """Holds W hypotheses per sentence: `bos` and up to L tokens.

  Scores of live hypotheses are log-probabilities. Ended hypotheses have final scores.
  """

  tokens: Int[Array, "B W L+1"]
  scores: Float[Array, "B W"]


class Search(NamedTuple):
  """Holds the state of a search for B sentences, each at its own length.

  Attributes:
    length: the number of tokens in the live hypotheses, without `bos`.
    limits: the maximum number of tokens.
    live, ended: the W best live hypotheses, and the W best that ended.
    cache: the cache of the live hypotheses.
  """

  length: Int[Array, " B"]
  limits: Int[Array, " B"]
  live: Hypotheses
  ended: Hypotheses
  cache: PyTree

  @property
  def is_live(self) -> Bool[Array, " B"]:
    """Returns which sentences have live hypotheses."""
    return jnp.any(self.live.scores > _NONE, axis=1)


def _reorder_rows(cache: PyTree, hypotheses: Int[Array, "B W"]) -> PyTree:
  """Gathers hypotheses from arrays [B, W, ...] by their indices."""
  return jax.tree.map(lambda x: _pick(x, hypotheses), cache)


def beam_search(
  decode: Decode,
  cache: PyTree,
  reorder: Callable[[PyTree, Int[Array, "B W"]], PyTree] = _reorder_rows,
  *,
  beam_size: int,
  max_length: int,
  length_limits: Int[Array, " B"],
  length_penalty: float = 0.6,
  stop: str = "bound",
  bos: int,
  eos: int,
  pad: int,
) -> tuple[Int[Array, "B W L"], Float[Array, "B W"]]:
  """Finds the best continuation of `bos` by a beam of W hypotheses.

  The score is log P(tokens) / ((5 + length) / 6)**length_penalty, as in Wu et al. 2016,
  section 7, without coverage. The length includes `eos`. Sentences do not influence one
  another. `pad` is never chosen.

  On many devices, call it in `jax.shard_map(..., check_vma=False)`. Then each device
  stops when its own sentences are done. Automatic partitioning would gather the logits
  at every step.

  Args:
    decode: maps the latest tokens [B, W] and the cache to the logits [B, W, V] of the
      next tokens and the new cache.
    cache: a pytree for `decode`, without any token. It needs room for `max_length`
      tokens.
    reorder: maps the cache and beam indices [B, W] to the cache of the next step. The
      new hypothesis w extends the old hypothesis that has the w-th index. The default
      gathers from arrays [B, W, ...].
    beam_size: W.
    max_length: L, the static length of the result.
    length_limits: the maximum length of each sentence, counting `eos`; at most L. In
      the paper it is the length of the source plus 50. Padding rows of a batch have
      limit 0 and get no hypotheses.
    length_penalty: 0 compares log-probabilities. Larger values favour longer outputs.
    stop: the rule to drop live hypotheses; the search for a sentence ends when none is
      left. "bound" drops those whose score at the limit would not beat the best one
      that ended. The best result is that of Tensor2Tensor's rule. "present" also drops
      those whose score at their present length does not beat the W-th best that ended.
      This takes fewer steps.
    bos: the token that starts every hypothesis. It is not in the result.
    eos: the token that ends a hypothesis.
    pad: the token after `eos` in the result.

  Returns:
    Tokens and their float32 scores, best first. If no hypothesis ended within the
    limit, the hypotheses that reached it are returned, without `eos`. The search ends
    once the best is found: the others are those that ended before, not always the next
    best. A missing hypothesis has score -inf and only `pad`. If logits are NaN, so is
    the score.

  >>> def count(tokens, cache):  # 3, 4, 5, ... and then 0, which is eos
  ...   return 9.0 * jax.nn.one_hot((tokens + 1) % 6, 7), cache
  >>> options = dict(beam_size=1, max_length=6, bos=2, eos=0, pad=6)
  >>> limits = jnp.array([6, 2])
  >>> tokens, scores = beam_search(count, (), length_limits=limits, **options)
  >>> tokens[:, 0].tolist()
  [[3, 4, 5, 0, 6, 6], [3, 4, 6, 6, 6, 6]]
  """
  limits = jnp.minimum(length_limits, max_length)
  first = begin(
    cache, limits, beam_size=beam_size, max_length=max_length, bos=bos, pad=pad
  )
  rules = dict(length_penalty=length_penalty, stop=stop, eos=eos, pad=pad)
  step = functools.partial(extend, decode=decode, reorder=reorder, **rules)

  def goes_on(search: Search) -> Array:
    return jnp.any(search.is_live)

  last = jax.lax.while_loop(goes_on, step, first)
  tokens, scores = last.ended
  return tokens[:, :, 1:], scores


def begin(
  cache: PyTree,
  limits: Int[Array, " B"],
  *,
  beam_size: int,
  max_length: int,
  bos: int,
  pad: int,
) -> Search:
  """Starts a search, with hypotheses of `bos` alone.

  The arguments are as in `beam_search`, and `limits` is its `length_limits`. Here a
  limit must not be above `max_length`.
  """
  shape = len(limits), beam_size
  tokens = jnp.full((*shape, max_length + 1), pad, jnp.int32)
  scores = jnp.full(shape, _NONE, jnp.float32)
  # Only one hypothesis per sentence is live, since W equal ones would stay equal.
  first_score = jnp.where(limits > 0, 0.0, _NONE)
  live_scores = scores.at[:, 0].set(first_score)
  live = Hypotheses(tokens.at[:, :, 0].set(bos), live_scores)
  ended = Hypotheses(tokens, scores)
  return Search(jnp.zeros_like(limits), limits, live, ended, cache)


def extend(
  search: Search,
  decode: Decode,
  reorder: Callable[[PyTree, Int[Array, "B W"]], PyTree] = _reorder_rows,
  *,
  length_penalty: float = 0.6,
  stop: str = "bound",
  eos: int,
  pad: int,
) -> Search:
  """Extends the live hypotheses by one token, and returns the new state.

  Sentences that are done stay as they are. The other arguments are as in `beam_search`.
  Raises ValueError if `length_penalty` is negative or `stop` has no such rule.

  >>> def count(tokens, cache):  # 3, 4, 5, ... and then 0, which is eos
  ...   return 9.0 * jax.nn.one_hot((tokens + 1) % 6, 7), cache
  >>> limits = jnp.array([6, 2])
  >>> search = begin((), limits, beam_size=1, max_length=6, bos=2, pad=6)
  >>> while search.is_live.any():
  ...   search = extend(search, count, eos=0, pad=6)
  >>> search.ended.tokens[:, 0, 1:].tolist()
  [[3, 4, 5, 0, 6, 6], [3, 4, 6, 6, 6, 6]]
  """
  if length_penalty < 0:
    raise ValueError(f"length_penalty is {length_penalty}; want 0 or more")
  if stop not in ("bound", "present"):
    raise ValueError(f"stop is {stop!r}; want bound or present")

  is_live = search.is_live[:, None]
  length = search.length[:, None] + is_live
  limits = search.limits[:, None]
  new, latest, beams, cache = _candidates(search, decode, pad)
  # In sentences that are done, all new scores are -inf or NaN: nothing changes.
  # A score of NaN ends its hypothesis, so that it is seen.
  is_end = is_live & ((latest == eos) | jnp.isnan(new.scores))
  is_last = is_live & (length == limits)
  scores = _final_scores(new.scores, length, length_penalty)
  finished = Hypotheses(new.tokens, scores)
  ended = _add_ended(search.ended, finished, is_end, is_last)

  bounds = _final_scores(new.scores, limits, length_penalty)
  highest = ended.scores[:, :1]
  lowest = ended.scores[:, -1:]
  goes_on = (bounds > highest) & ~is_end & ~is_last
  if stop == "present":
    goes_on &= scores > lowest
  live_scores = jnp.where(goes_on, new.scores, _NONE)
  beam_size = search.live.scores.shape[1]
  live_scores, best = jax.lax.top_k(live_scores, beam_size)
  live = Hypotheses(_pick(new.tokens, best), live_scores)
  cache = reorder(cache, _pick(beams, best))
  return Search(length[:, 0], search.limits, live, ended, cache)


def _final_scores(
  log_probs: Float[Array, "B C"], length: Int[Array, "B 1"], length_penalty: float
) -> Float[Array, "B C"]:
  ratio = (5.0 + length) / 6.0
  return log_probs / ratio**length_penalty


def _candidates(
  search: Search, decode: Decode, pad: int
) -> tuple[Hypotheses, Array, Array, PyTree]:
  """Finds the 2W best extensions of the live hypotheses by one token.

  If W is 1, it finds only the best one. Returns the extended hypotheses, their last
  tokens [B, 2W], the indices [B, 2W] of the live hypotheses that they extend, and the
  new cache from `decode`.
  """
  tokens, scores = search.live
  position = search.length[:, None, None]
  latest = jnp.take_along_axis(tokens, position, axis=2)[:, :, 0]
  is_live = search.is_live[:, None]
  latest = jnp.where(is_live, latest, pad)
  logits, cache = decode(latest, search.cache)
  logits = logits.astype(jnp.float32)
  beam_size = scores.shape[1]
  num_candidates = 1
  if beam_size > 1:
    num_candidates = min(2 * beam_size, logits[0].size)
  scores, beams, latest = _best(logits, scores, num_candidates, pad)
  positions = jnp.arange(tokens.shape[2])
  is_new = positions == position + 1
  tokens = _pick(tokens, beams)
  tokens = jnp.where(is_new, latest[:, :, None], tokens)
  return Hypotheses(tokens, scores), latest, beams, cache


def _best(
  logits: Array, scores: Array, count: int, pad: int
) -> tuple[Array, Array, Array]:
  """Finds the `count` best sums of a beam's score and a token's log-probability.

  Takes logits [B, W, V] and scores [B, W]. Returns the sums, their beam indices and
  their tokens, each [B, count]. `pad` is never among the tokens.

  To search less than the whole vocabulary, it cuts the vocabulary into blocks and ranks
  the blocks by their maxima. Then it searches only the first `count` blocks, and W
  more, since `pad` may be the maximum of one block in each beam.
  """
  num_sentences, beam_size, vocabulary = logits.shape
  sizes = [size for size in _BLOCKS if vocabulary % size == 0]
  size = max(sizes, default=_BLOCKS[0])
  # Added only to the candidates at the end, to avoid an array of all sums.
  totals = jax.nn.logsumexp(logits, axis=-1)
  added = scores - totals
  missing = -vocabulary % size
  padding = (0, 0), (0, 0), (0, missing)
  logits = jnp.pad(logits, padding, constant_values=_NONE)
  blocks = logits.reshape(num_sentences, beam_size, -1, size)
  highest = blocks.max(-1) + added[:, :, None]

  num_blocks = highest.shape[2]  # per beam
  highest = highest.reshape(num_sentences, -1)
  # One more block for each beam, since `pad` may have the highest maximum there. It is
  # masked in these blocks only, since masking in all of them would copy the logits.
  num_best = min(count + beam_size, highest.shape[1])
  _, best = jax.lax.top_k(highest, num_best)
  best = jnp.sort(best)  # so that the first of equal sums win
  beams, numbers = jnp.divmod(best, num_blocks)
  tokens = size * numbers[:, :, None] + jnp.arange(size, dtype=jnp.int32)
  blocks = blocks.reshape(num_sentences, -1, size)
  added = _pick(added, beams)
  sums = _pick(blocks, best) + added[:, :, None]
  sums = jnp.where(tokens == pad, _NONE, sums)
  sums = sums.reshape(num_sentences, -1)
  tokens = tokens.reshape(num_sentences, -1)
  scores, index = jax.lax.top_k(sums, count)
  beams = _pick(beams, index // size)
  return scores, beams, _pick(tokens, index)


def _add_ended(ended: Hypotheses, new: Hypotheses, is_end, is_last) -> Hypotheses:
  """Returns the W best hypotheses that have ended.

  If a sentence reaches its limit before any hypothesis has ended, its live hypotheses
  count as ended.
  """
  end_scores = jnp.where(is_end, new.scores, _NONE)
  both = jnp.concatenate([ended.scores, end_scores], axis=1)
  has_ended = jnp.any(both > _NONE, axis=1, keepdims=True)
  end_scores = jnp.where(is_last & ~has_ended, new.scores, end_scores)
  scores = jnp.concatenate([ended.scores, end_scores], axis=1)
  tokens = jnp.concatenate([ended.tokens, new.tokens], axis=1)
  # The first of equal scores win, so that missing hypotheses stay padding.
  beam_size = ended.scores.shape[1]
  scores, best = jax.lax.top_k(scores, beam_size)
  return Hypotheses(_pick(tokens, best), scores)


def _pick(x: Array, indices: Int[Array, "B *C"]) -> Array:
  """Returns x[indices] for each sentence."""
  return jax.vmap(operator.getitem)(x, indices)
