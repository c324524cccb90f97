"""The paper's learning rate and its Adam (Shaw et al. 2018, section 4.1)."""

import jax.numpy as jnp
import optax


def inverse_sqrt(peak: float, warmup: int) -> optax.Schedule:
  """Rises linearly to `peak` at update number `warmup`, then falls as 1 / sqrt(update).

  rate(t) = peak * min(t / warmup, sqrt(warmup / t)), where t = count + 1: updates are numbered
  from 1, optax counts from 0. The first update thus moves the parameters.

  Args:
    peak: the highest rate, above 0; recipes that say "rate 0.005, warmup 2000" mean this one.
    warmup: the update at which the peak is reached, at least 1.

  Raises:
    ValueError: `peak` or `warmup` is out of range.

  >>> rate = inverse_sqrt(peak=0.005, warmup=2000)
  >>> [round(float(rate(t - 1)), 6) for t in (1, 1000, 2000, 8000)]
  [3e-06, 0.0025, 0.005, 0.0025]
  """
  if not peak > 0:
    raise ValueError(f"peak must be above 0, not {peak}")
  if not warmup >= 1:
    raise ValueError(f"warmup must be at least 1 update, not {warmup}")

  def rate(count):
    t = jnp.asarray(count, jnp.float32) + 1
    return peak * jnp.minimum(t / warmup, jnp.sqrt(warmup / t))

  return rate


def paper_schedule(d_model: int, warmup: int = 4000, rate: float = 1.0) -> optax.Schedule:
  """Returns the paper's schedule, an inverse square root whose peak depends on the model's width.

  rate * d_model**-0.5 * min(t**-0.5, t * warmup**-1.5), with t numbered from 1: the same as
  `inverse_sqrt` with the peak rate * (d_model * warmup)**-0.5. Vaswani et al. 2017, section 5.3;
  Shaw et al. 2018 have warmup 4000 and rate 1; the code from October 2017 on has 8000 and 2.

  Raises:
    ValueError: an argument is not above 0.

  >>> rate = paper_schedule(d_model=512)
  >>> round(float(rate(4000 - 1)), 6)
  0.000699
  """
  if not d_model >= 1:
    raise ValueError(f"d_model must be at least 1, not {d_model}")
  if not warmup >= 1:
    raise ValueError(f"warmup must be at least 1 update, not {warmup}")
  return inverse_sqrt(rate * (d_model * warmup) ** -0.5, warmup)


def adam(
  schedule: optax.Schedule, b1: float = 0.9, b2: float = 0.98, eps: float = 1e-9
) -> optax.GradientTransformation:
  """Returns Adam with the paper's constants, without clipping and weight decay.

  >>> import jax.numpy as jnp
  >>> optimizer = adam(inverse_sqrt(peak=0.1, warmup=1))
  >>> updates, _ = optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))
  >>> [round(float(update), 4) for update in updates]
  [-0.1, -0.1]
  """
  return optax.adam(schedule, b1=b1, b2=b2, eps=eps)
