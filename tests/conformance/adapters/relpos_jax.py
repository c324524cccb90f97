"""relpos_jax, by the implementation that it chooses or by name."""

import functools

import jax.numpy as jnp

import relpos_jax
from adapters import in_jax, takes

PACKAGES = ("relpos_jax", "jax")
NAMES = {
  "query_positions": "query_positions",
  "key_positions": "key_positions",
  "query_segments": "query_segment_ids",
  "key_segments": "key_segment_ids",
  "query_offset": "query_offset",
  "bias": "bias",
  "mask": "mask",
  "sinks": "sinks",
  "scale": "scale",
  "causal": "is_causal",
  "window": "local_window_size",
  "soft_cap": "logits_soft_cap",
}
RELATIONS = ("key_table", "query_table", "value_table", "distance_bias", "buckets")
RELATIONS += ("labels", "content_bias", "position_bias")
RELATIONS += ("left", "beyond", "t5", "alibi", "rotary")


def attend_by(implementation):
  """Returns the adapter of an implementation by name."""
  function = functools.partial(output_of, implementation=implementation)
  return takes(*NAMES, *RELATIONS)(in_jax(function))


def output_of(x, options, implementation):
  q, k = turned(x, options)
  arguments = {}
  for name, value in (x | options).items():
    if name in NAMES:
      arguments[NAMES[name]] = value
  if "content_bias" in x:  # Transformer-XL
    scale = options.get("scale", q.shape[-1] ** -0.5)
    position_query = scale * (q + x["position_bias"])
    rows = rows_of(options)
    relations = (relpos_jax.ContentBias(position_query, x["key_table"], **rows),)
    q = q + x["content_bias"]
  else:
    relations = relations_of(x, options)
  return relpos_jax.dot_product_attention(
    q, k, x["value"], relations=relations, implementation=implementation, **arguments
  )


def turned(x, options):
  q, k = x["query"], x["key"]
  if "rotary" not in options:
    return q, k
  if options["rotary"] == "interleaved":  # ours turns halves
    q = jnp.concatenate([q[..., ::2], q[..., 1::2]], -1)
    k = jnp.concatenate([k[..., ::2], k[..., 1::2]], -1)
  query_at = jnp.arange(q.shape[1]) + options.get("query_offset", 0)
  return relpos_jax.rotate(q, query_at), relpos_jax.rotate(k, jnp.arange(k.shape[1]))


def rows_of(options):
  return {name: options[name] for name in ("beyond", "left") if name in options}


def relations_of(x, options):
  tables = x.get("key_table"), x.get("value_table")
  rows = rows_of(options)
  relations = []
  if "labels" in x:
    relations.append(relpos_jax.EdgeLabels(x["labels"], *tables))
  elif "key_table" in x or "value_table" in x:
    relations.append(relpos_jax.RelativePositions(*tables, **rows))
  if "query_table" in x:
    relations.append(relpos_jax.KeyBias(x["query_table"], **rows))
  if "distance_bias" in x:
    relations.append(relpos_jax.DistanceBias(x["distance_bias"], **rows))
  if "buckets" in x:
    relations.append(relpos_jax.DistanceBias.t5(x["buckets"], *options["t5"]))
  if options.get("alibi"):
    relations.append(relpos_jax.LinearBias.alibi(x["query"].shape[2]))
  return tuple(relations)


attend = attend_by(None)
reference = attend_by("reference")
projected = attend_by("projected")
chunked = attend_by("chunked")
skew = attend_by("skew")
