"""The model that decodes with a cache."""

from flax import nnx

from relpos_jax.typing import PyTree


def decoding_model(graphdef: nnx.GraphDef, params: PyTree) -> nnx.Module:
  """The model, put together, whose attention takes the fastest implementation of all that can.

  A decoder reads one token against a cache, at positions of its own: what a config names, as what
  is fastest in training (`implementation="skew"`), may not do that.
  """
  model = nnx.merge(graphdef, params)
  model.set_attributes(implementation=None, raise_if_not_found=False)
  return model
