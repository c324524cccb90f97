"""Computes the loss of tokens and classes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from relpos_jax.typing import Array, Float, Int


class Loss(NamedTuple):
  """Holds the sum of losses and the number of targets; padding counts in neither.

  The loss per token is `sum` / `num_tokens`.
  """

  sum: Float[Array, ""]
  num_tokens: Int[Array, ""]


def cross_entropy(
  logits: Float[Array, "*B V"],
  targets: Int[Array, "*B"],
  *,
  smoothing: float = 0.0,
  pad: int = 0,
) -> Loss:
  """Computes the cross-entropy in nats with label smoothing, summed over tokens.

  Tokens that equal `pad` do not count.

  The target distribution q is 1 - smoothing at the target, and smoothing / (V - 1)
  elsewhere (Szegedy et al. 2016, section 7; Shaw et al. 2018 use 0.1). The entropy of q
  is subtracted, so the loss is KL(q || softmax(logits)). It is 0 if and only if the
  prediction is q. With smoothing 0 it is the negative log likelihood.

  It is computed in float32 from logsumexp, the target's logit and the sum of all
  logits. So the forward pass stores no array of V entries per token; only the gradient
  has that size. The backward pass is softmax minus q.
  """
  logits = logits.astype(jnp.float32)
  other = smoothing / (logits.shape[-1] - 1)
  target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  expected_logit = (1 - smoothing - other) * target_logits
  entropy = 0.0
  if smoothing:
    expected_logit += other * jnp.sum(logits, axis=-1)
    entropy = -float(
      (1 - smoothing) * np.log(1 - smoothing) + smoothing * np.log(other)
    )
  losses = jax.nn.logsumexp(logits, axis=-1) - expected_logit - entropy
  is_token = targets != pad
  return Loss(jnp.sum(losses, where=is_token), jnp.sum(is_token, dtype=jnp.int32))


def shift_right(targets: Int[Array, "B T"], bos: int) -> Int[Array, "B T"]:
  """Returns the decoder's input: `bos`, then all targets except the last.

  >>> shift_right(jnp.array([[7, 8, 3, 0]]), bos=1).tolist()
  [[1, 7, 8, 3]]
  """
  return jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=bos)
