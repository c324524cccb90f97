"""Beam search as a pure function of a step-wise decoder and its cache.

Every step takes the 2W most probable extensions of the live hypotheses, as in Tensor2Tensor. Those
that end are stored with their final score, and the W best of the others go on. With W = 1 it takes
one, and is greedy decoding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relpos_jax.typing import Array, Float, Int, PyTree

# The score of no hypothesis: it loses every comparison, and adding log-probabilities keeps it.
_NONE = -jnp.inf


def beam_search(
  decode: Callable[[Int[Array, "BW 1"], PyTree], tuple[Float[Array, "BW 1 V"], PyTree]],
  cache: PyTree,
  *,
  beam_size: int,
  max_length: int,
  length_limits: Int[Array, " B"],
  length_penalty: float = 0.6,
  bos: int,
  eos: int,
  pad: int,
) -> tuple[Int[Array, "B W L"], Float[Array, "B W"]]:
  """Finds the W best continuations of `bos` by log P(tokens) / ((5 + length) / 6)**length_penalty.

  The score is that of Wu et al. 2016, section 7, without coverage; the length counts `eos`. The
  search for a sentence stops once no live hypothesis can beat the best one that ended, so that the
  best hypothesis is exact and the others are those that had ended by then. Sentences do not
  influence one another. `pad` is never chosen.

  To search on many devices, map it over them with `jax.shard_map(..., check_vma=False)`: each then
  stops by itself, whereas automatic partitioning would gather the logits at every step.

  Args:
    decode: maps the latest tokens [B*W, 1] and the cache to the logits [B*W, 1, V] of the next
      tokens and the new cache. The W hypotheses of a sentence are adjacent rows.
    cache: a pytree of arrays [B, ...] that has not read `bos` yet. They are repeated to
      [B*W, ...] and reordered with the hypotheses. `decode` reads at most `max_length` tokens.
    beam_size: W.
    max_length: L, the static length of the result.
    length_limits: the most tokens of each sentence, `eos` included, and L at most: the paper's
      is the source's length + 50. Rows that only fill up a batch have limit 0 and no hypotheses.
    length_penalty: 0 compares log-probabilities; the larger, the longer the output.
    bos: the token that starts every hypothesis and is not in the result.
    eos, pad: the token that ends a hypothesis, and the one that follows it in the result.

  Returns:
    Tokens and their float32 scores, best first. If no hypothesis ended within the limit, those that
    reached it are returned without `eos`. A missing hypothesis has score -inf and only `pad`.

  >>> def count(tokens, cache):  # 3, 4, 5, ... and then 0, which is eos
  ...   return 9.0 * jax.nn.one_hot((tokens + 1) % 6, 7), cache
  >>> tokens, scores = beam_search(count, (), beam_size=1, max_length=6, bos=2, eos=0, pad=6,
  ...                              length_limits=jnp.array([6, 2]))
  >>> tokens[:, 0].tolist()
  [[3, 4, 5, 0, 6, 6], [3, 4, 6, 6, 6, 6]]
  """
  if length_penalty < 0:
    raise ValueError(f"length_penalty is {length_penalty}; want 0 or more")
  limits = jnp.minimum(length_limits, max_length)[:, None]
  score = lambda log_probs, length: log_probs / ((5.0 + length) / 6.0) ** length_penalty

  def step(state: _State) -> _State:
    length = state.length + 1
    new, beams, cache = _extend(state, decode, pad)
    is_end = new.tokens[:, :, length] == eos
    scored = _Hypotheses(new.tokens, score(new.scores, length))
    ended = _add_ended(state.ended, scored, is_end, length == limits)
    can_win = score(new.scores, limits) > ended.scores[:, :1]
    is_live = ~is_end & can_win & (length < limits)
    scores, best = jax.lax.top_k(_keep(new, is_live).scores, beam_size)
    live, beams = _Hypotheses(_pick(new.tokens, best), scores), _pick(beams, best)
    split = lambda x: x.reshape(*beams.shape, *x.shape[1:])
    cache = jax.tree.map(lambda x: _pick(split(x), beams).reshape(x.shape), cache)
    return _State(length, live, ended, cache)

  none = jnp.full((limits.shape[0], beam_size), _NONE, jnp.float32)
  padding = jnp.full((*none.shape, max_length + 1), pad, jnp.int32)
  # One hypothesis per sentence: W equal ones would stay equal.
  live = none.at[:, :1].set(jnp.where(limits > 0, 0.0, _NONE))
  first = _State(
    length=jnp.int32(0),
    live=_Hypotheses(padding.at[:, :, 0].set(bos), live),
    ended=_Hypotheses(padding, none),
    cache=jax.tree.map(lambda x: jnp.repeat(x, beam_size, axis=0), cache),
  )
  last = jax.lax.while_loop(lambda state: jnp.any(state.live.scores > _NONE), step, first)
  return last.ended.tokens[:, :, 1:], last.ended.scores


class _Hypotheses(NamedTuple):
  """`bos` and L tokens; scored by log-probability while live, by the final score when ended.

  There are W, or while they are chosen 2W.
  """

  tokens: Int[Array, "B W L+1"]
  scores: Float[Array, "B W"]


class _State(NamedTuple):
  length: Int[Array, ""]
  live: _Hypotheses
  ended: _Hypotheses
  cache: PyTree


def _extend(state: _State, decode, pad) -> tuple[_Hypotheses, Int[Array, "B C"], PyTree]:
  """Returns the C most probable extensions by one token, their hypotheses, and the new cache."""
  batch_size, beam_size = state.live.scores.shape
  latest = jax.lax.dynamic_index_in_dim(state.live.tokens, state.length, axis=2)
  logits, cache = decode(latest.reshape(-1, 1), state.cache)
  vocabulary = logits.shape[-1]

  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).at[..., pad].set(_NONE)
  log_probs = state.live.scores[:, :, None] + log_probs.reshape(batch_size, beam_size, vocabulary)
  num_candidates = min(2 * beam_size, beam_size * vocabulary) if beam_size > 1 else 1
  log_probs, indices = jax.lax.top_k(log_probs.reshape(batch_size, -1), num_candidates)
  beams, words = indices // vocabulary, indices % vocabulary
  tokens = _pick(state.live.tokens, beams).at[:, :, state.length + 1].set(words)
  return _Hypotheses(tokens, log_probs), beams, cache


def _add_ended(ended: _Hypotheses, new: _Hypotheses, is_end, at_limit) -> _Hypotheses:
  """Returns the W best hypotheses that have ended; at the limit, live ones if none has ended."""
  none_ended = jnp.all(ended.scores == _NONE, axis=1) & ~jnp.any(
    is_end & (new.scores > _NONE), axis=1
  )
  new = _keep(new, is_end | (at_limit & none_ended[:, None]))
  # Of equal scores the first are taken, so that missing hypotheses stay padding.
  scores, indices = jax.lax.top_k(
    jnp.concatenate([ended.scores, new.scores], axis=1), ended.scores.shape[1]
  )
  return _Hypotheses(_pick(jnp.concatenate([ended.tokens, new.tokens], axis=1), indices), scores)


def _keep(hypotheses: _Hypotheses, which) -> _Hypotheses:
  return hypotheses._replace(scores=jnp.where(which, hypotheses.scores, _NONE))


def _pick(x: Array, indices: Int[Array, "B C"]) -> Array:
  """Returns x[indices] for each sentence."""
  return jax.vmap(lambda row, of_row: row[of_row])(x, indices)
