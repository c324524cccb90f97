"""Beam search as a pure function of a step-wise decoder and its cache.

Every step takes the 2W most probable extensions of the live hypotheses, as in
Tensor2Tensor. Those that end are stored with their final score, and the W best of the
others go on. With W = 1 it takes one extension, which is greedy decoding.

`beam_search` returns when all sentences of a batch are done. To replace sentences as
they are done, call `begin`, and `extend` in a loop of your own.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Bool, Float, Int, PyTree

# The score of no hypothesis: it loses every comparison, and adding log-probabilities
# keeps it.
_NONE = -jnp.inf
# Sizes of a block of the vocabulary, whose best token is found first. The first that
# divides the vocabulary's size is taken; if there is none, the logits are copied with
# padding.
_BLOCKS = range(128, 15, -1)

# Maps the latest tokens and the cache to the logits of the next tokens, and the new
# cache.
Decode = Callable[[Int[Array, "B W"], PyTree], tuple[Float[Array, "B W V"], PyTree]]


class Hypotheses(NamedTuple):
  """`bos` and L tokens; scored by log-probability while live, by the final score when ended."""

  tokens: Int[Array, "B W L+1"]
  scores: Float[Array, "B W"]


class Search(NamedTuple):
  """A search for B sentences, each at a length of its own.

  Attributes:
    length: tokens of the live hypotheses of each sentence, without `bos`.
    limits: the most tokens of each sentence.
    live, ended: the W best of either kind.
    cache: of the live hypotheses.
  """

  length: Int[Array, " B"]
  limits: Int[Array, " B"]
  live: Hypotheses
  ended: Hypotheses
  cache: PyTree

  @property
  def is_live(self) -> Bool[Array, " B"]:
    """Returns the sentences whose search goes on."""
    return jnp.any(self.live.scores > _NONE, axis=1)


def reorder_rows(cache: PyTree, hypotheses: Int[Array, "B W"]) -> PyTree:
  """Gathers from arrays [B, W, ...] the rows of the given hypotheses of each sentence."""
  return jax.tree.map(lambda x: _pick(x, hypotheses), cache)


def beam_search(
  decode: Decode,
  cache: PyTree,
  reorder: Callable[[PyTree, Int[Array, "B W"]], PyTree] = reorder_rows,
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
  """Finds the W best continuations of `bos` by log P(tokens) / ((5 + length) /
  6)**length_penalty.

  The score is that of Wu et al. 2016, section 7, without coverage; the length counts
  `eos`. Sentences do not influence one another. `pad` is never chosen.

  On many devices, call it in `jax.shard_map(..., check_vma=False)`: each then stops
  when its own sentences are done. Automatic partitioning would gather the logits at
  every step.

  Args:
    decode: maps the latest tokens [B, W] and the cache to the logits [B, W, V] of the
      next tokens and the new cache.
    cache: a pytree that has not read `bos` yet. `decode` reads at most `max_length`
      tokens.
    reorder: maps a cache, and which hypothesis each of the next W extends, to the cache
      of these. By default a cache has arrays [B, W, ...], whose rows are gathered.
    beam_size: W.
    max_length: L, the static length of the result.
    length_limits: the most tokens of each sentence, `eos` included, and L at most: the
      paper's is the source's length + 50. Rows that only fill up a batch have limit 0
      and no hypotheses.
    length_penalty: 0 compares log-probabilities; the larger, the longer the output.
    stop: when the search for a sentence ends. "bound", the rule of Tensor2Tensor: once
      no live hypothesis can beat the best one that ended, so that the best is exact.
      "present" also stops once none, at its present length, beats the W-th best that
      ended, the rule of Hugging Face, which takes fewer steps. (fairseq stops once W
      have ended, which favours short ones.)
    bos: the token that starts every hypothesis and is not in the result.
    eos, pad: the token that ends a hypothesis, and the one that follows it in the
      result.

  Returns:
    Tokens and their float32 scores, best first. If no hypothesis ended within the
    limit, those that reached it are returned without `eos`. A missing hypothesis has
    score -inf and only `pad`.

  >>> def count(tokens, cache):  # 3, 4, 5, ... and then 0, which is eos
  ...   return 9.0 * jax.nn.one_hot((tokens + 1) % 6, 7), cache
  >>> tokens, scores = beam_search(count, (), beam_size=1, max_length=6, bos=2, eos=0, pad=6,
  ...                              length_limits=jnp.array([6, 2]))
  >>> tokens[:, 0].tolist()
  [[3, 4, 5, 0, 6, 6], [3, 4, 6, 6, 6, 6]]
  """
  limits = jnp.minimum(length_limits, max_length)
  first = begin(
    cache, limits, beam_size=beam_size, max_length=max_length, bos=bos, pad=pad
  )
  rules = dict(length_penalty=length_penalty, stop=stop, eos=eos, pad=pad)
  step = functools.partial(extend, decode=decode, reorder=reorder, **rules)
  last = jax.lax.while_loop(lambda search: jnp.any(search.is_live), step, first)
  return last.ended.tokens[:, :, 1:], last.ended.scores


def begin(
  cache: PyTree,
  limits: Int[Array, " B"],
  *,
  beam_size: int,
  max_length: int,
  bos: int,
  pad: int,
) -> Search:
  """Returns a search of hypotheses that have only `bos`; see `beam_search`."""
  none = jnp.full((len(limits), beam_size), _NONE, jnp.float32)
  padding = jnp.full((*none.shape, max_length + 1), pad, jnp.int32)
  # One hypothesis per sentence: W equal ones would stay equal.
  scores = none.at[:, :1].set(jnp.where(limits[:, None] > 0, 0.0, _NONE))
  return Search(
    length=jnp.zeros_like(limits),
    limits=limits,
    live=Hypotheses(padding.at[:, :, 0].set(bos), scores),
    ended=Hypotheses(padding, none),
    cache=cache,
  )


def extend(
  search: Search,
  decode: Decode,
  reorder: Callable[[PyTree, Int[Array, "B W"]], PyTree] = reorder_rows,
  *,
  length_penalty: float = 0.6,
  stop: str = "bound",
  eos: int,
  pad: int,
) -> Search:
  """Extends the live hypotheses by one token; see `beam_search`. Sentences that are done stay."""
  if length_penalty < 0:
    raise ValueError(f"length_penalty is {length_penalty}; want 0 or more")
  if stop not in ("bound", "present"):
    raise ValueError(f"stop is {stop!r}; want bound or present")

  def score(
    log_probs: Float[Array, "B C"], length: Int[Array, "B 1"]
  ) -> Float[Array, "B C"]:
    return log_probs / ((5.0 + length) / 6.0) ** length_penalty

  length, limits = search.length[:, None] + 1, search.limits[:, None]
  new, beams, cache = _candidates(search, decode, pad)
  is_end = jnp.take_along_axis(new.tokens, length[:, None], axis=2)[:, :, 0] == eos
  scored = Hypotheses(new.tokens, score(new.scores, length))
  beam_size, is_last = search.live.scores.shape[1], length == limits
  ended = _add_ended(search.ended, scored, is_end, is_last)
  goes_on = score(new.scores, limits) > ended.scores[:, :1]
  if stop == "present":
    goes_on &= scored.scores > ended.scores[:, -1:]
  scores, best = jax.lax.top_k(
    _keep(new, goes_on & ~is_end & ~is_last).scores, beam_size
  )
  live = Hypotheses(_pick(new.tokens, best), scores)
  cache = reorder(cache, _pick(beams, best))
  extended = Search(length[:, 0], search.limits, live, ended, cache=None)
  where_live = functools.partial(jax.vmap(jnp.where), search.is_live)
  return jax.tree.map(where_live, extended, search._replace(cache=None))._replace(
    cache=cache
  )


def _candidates(
  search: Search, decode: Decode, pad: int
) -> tuple[Hypotheses, Array, PyTree]:
  """Returns the 2W best extensions by one token, the hypotheses that they extend, and the cache."""
  tokens, scores = search.live
  beam_size = scores.shape[1]
  latest = jnp.take_along_axis(tokens, search.length[:, None, None], axis=2)[:, :, 0]
  latest = jnp.where(search.is_live[:, None], latest, pad)
  logits, cache = decode(latest, search.cache)
  logits = logits.astype(jnp.float32)
  count = min(2 * beam_size, logits[0].size) if beam_size > 1 else 1
  scores, beams, latest = _best(logits, scores, count, pad)
  is_new = jnp.arange(tokens.shape[2]) == search.length[:, None, None] + 1
  tokens = jnp.where(is_new, latest[:, :, None], _pick(tokens, beams))
  return Hypotheses(tokens, scores), beams, cache


def _best(
  logits: Array, scores: Array, count: int, pad: int
) -> tuple[Array, Array, Array]:
  """Returns the C best sums of scores [B, W] and log-probabilities, their beams and
  tokens.

  The best C are in the C blocks of tokens with the highest maxima, so that two short
  searches find them, among the maxima and in these blocks, instead of one in the whole
  vocabulary.
  """
  vocabulary = logits.shape[-1]
  block = next((n for n in _BLOCKS if vocabulary % n == 0), _BLOCKS[0])
  # A beam's score and the normaliser of its logits are added to what is left of them at
  # the end: an array of all sums would be written and read once more.
  added = scores - jax.nn.logsumexp(logits, axis=-1)
  highest = _highest_of_blocks(logits, pad, block)
  num = highest.shape[2]  # blocks of a beam
  highest = (highest + added[:, :, None]).reshape(len(logits), -1)
  _, blocks = jax.lax.top_k(highest, min(count, highest.shape[1]))
  beams, firsts = jnp.divmod(
    jnp.sort(blocks), num
  )  # sorted: of equal sums the first are taken
  tokens = (firsts * block)[:, :, None] + jnp.arange(block)
  found = jax.vmap(lambda x, *at: x.at[at].get(mode="fill", fill_value=_NONE))(
    logits, beams[:, :, None], tokens
  )
  sums = jnp.where(tokens == pad, _NONE, found + _pick(added, beams)[:, :, None])
  best, at = jax.lax.top_k(sums.reshape(len(sums), -1), count)
  return best, _pick(beams, at // block), _pick(tokens.reshape(len(sums), -1), at)


def _highest_of_blocks(
  logits: Array, pad: int, block: int
) -> Float[Array, "B W blocks"]:
  """Returns the highest logit of each block of tokens, `pad` excluded."""
  room = (0, 0), (0, 0), (0, -logits.shape[2] % block)
  in_blocks = jnp.pad(logits, room, constant_values=_NONE).reshape(
    *logits.shape[:2], -1, block
  )
  own, at = in_blocks[:, :, pad // block], jnp.arange(block)
  own = jnp.where(
    at == pad % block, _NONE, own
  )  # of the one block, as masking all would copy them
  return in_blocks.max(-1).at[:, :, pad // block].set(own.max(-1))


def _add_ended(ended: Hypotheses, new: Hypotheses, is_end, at_limit) -> Hypotheses:
  """Returns the W best hypotheses that have ended; at the limit, live ones if none has ended."""
  any_ended = jnp.any(ended.scores > _NONE, axis=1) | jnp.any(
    is_end & (new.scores > _NONE), axis=1
  )
  new = _keep(new, is_end | (at_limit & ~any_ended[:, None]))
  tokens, scores = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), ended, new)
  # Of equal scores the first are taken, so that missing hypotheses stay padding.
  scores, best = jax.lax.top_k(scores, ended.scores.shape[1])
  return Hypotheses(_pick(tokens, best), scores)


def _keep(hypotheses: Hypotheses, which) -> Hypotheses:
  return hypotheses._replace(scores=jnp.where(which, hypotheses.scores, _NONE))


def _pick(x: Array, indices: Int[Array, "B *C"]) -> Array:
  """Returns x[indices] for each sentence."""
  return jax.vmap(operator.getitem)(x, indices)
