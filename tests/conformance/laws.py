"""Lists what has to hold.

`law(attend, arrays, options)` returns two dictionaries of arrays, with the same names:
what the implementation computes, and what it should compute. Laws compare the output
and all gradients, unless their docstrings say otherwise.
"""

import numpy as np
import papers

FAR = 2_000_000_000  # fits in 32 bits


def results(call):
  """Returns the output and the gradients of a call in one dictionary."""
  output, gradients = call
  return {"output": output, **gradients}


def equals_the_paper(attend, arrays, options):
  """The output and every gradient are those of the published equations."""
  return results(attend(arrays, options)), results(papers.attention(arrays, options))


def is_fresh(attend, arrays, options):
  """A call returns nothing that an earlier call computed from other arrays."""
  others = {name: values[::-1].copy() for name, values in arrays.items()}
  attend(others, {**options, "query_offset": 3})
  return equals_the_paper(attend, arrays, options)


def depends_on_distances(attend, arrays, options):
  """Adding a number to all positions changes no bit."""
  queries, keys = arrays["query"].shape[1], arrays["key"].shape[1]
  near = {"query_positions": np.arange(queries), "key_positions": np.arange(keys)}
  far = {name: at + FAR for name, at in near.items()}
  actual = results(attend({**arrays, **far}, options))
  return actual, results(attend({**arrays, **near}, options))


def zero_for_zero(attend, arrays, options):
  """A cotangent of zeros gives gradients of zeros, and the output is finite."""
  cotangent = np.zeros_like(arrays["cotangent"])
  output, gradients = attend({**arrays, "cotangent": cotangent}, options)
  actual = {"output": np.isfinite(output).astype(float), **gradients}
  wanted = {name: np.zeros_like(x) for name, x in gradients.items()}
  return actual, {"output": np.ones_like(output), **wanted}


def equals_the_paper_where_attended(attend, arrays, options):
  """As `equals_the_paper`, but a query without keys may have any output.

  Its cotangent is zero, as if a loss left it out. It must not change any gradient.
  """
  unmasked = papers.attended(arrays, options, distances(arrays, options)).any((1, 3))
  unmasked = unmasked[:, :, None, None]
  arrays = {**arrays, "cotangent": np.where(unmasked, arrays["cotangent"], 0)}
  arrays["cotangent"] = arrays["cotangent"].astype(arrays["query"].dtype)
  actual, wanted = equals_the_paper(attend, arrays, options)
  actual["output"] = np.where(unmasked, actual["output"], 0)
  return actual, wanted


def distances(arrays, options):
  """Returns j - i, [B, T, S]."""
  query_at, key_at = papers.positions(arrays, options)
  return key_at[:, None, :] - query_at[:, :, None]


def masked_keys_are_inert(attend, arrays, options):
  """Other numbers in keys that nobody attends to change nothing."""
  is_attended = papers.attended(arrays, options, distances(arrays, options)).any((1, 2))
  is_attended = is_attended[:, :, None, None]
  changed = {
    name: np.where(is_attended, arrays[name], 100.0).astype(arrays[name].dtype)
    for name in ("key", "value")
  }
  actual = results(attend({**arrays, **changed}, options))
  return actual, results(attend(arrays, options))


def later_keys_get_no_gradient(attend, arrays, options):
  """Causal: the first five queries give later keys no gradient.

  It compares the gradients of those keys and values alone.
  """
  cotangent = arrays["cotangent"].copy()
  cotangent[:, 5:] = 0
  _, gradients = attend({**arrays, "cotangent": cotangent}, options)
  actual = {name: gradients[name][:, 5:] for name in ("key", "value")}
  return actual, {name: np.zeros_like(x) for name, x in actual.items()}


def queries_one_by_one(attend, arrays, options):
  """Decoding a query at a time gives the same output; the cache has later slots.

  Those slots hold other numbers, and causality masks them. Only outputs are compared.
  """
  wanted, _ = attend(arrays, options)
  outputs = []
  for step in range(arrays["query"].shape[1]):
    one = dict(arrays)
    for name in ("query", "cotangent"):
      one[name] = arrays[name][:, step : step + 1]
    for name in ("key", "value"):
      one[name] = arrays[name].copy()
      one[name][:, step + 1 :] = 50.0
    output, _ = attend(one, {**options, "query_offset": step})
    outputs.append(np.asarray(output))
  return {"output": np.concatenate(outputs, 1)}, {"output": wanted}


def sequences_one_by_one(attend, arrays, options):
  """A batch has the outputs of its sequences alone."""
  outputs = []
  for row in range(len(arrays["query"])):
    one = dict(arrays)
    for name, values in arrays.items():
      has_batch = name in ("query", "key", "value", "cotangent", "mask", "labels")
      one[name] = values[row : row + 1] if has_batch else values
    output, _ = attend(one, options)
    outputs.append(np.asarray(output))
  output, _ = attend(arrays, options)
  return {"output": output}, {"output": np.concatenate(outputs)}


def permutes_with_its_tokens(attend, arrays, options):
  """Tokens in another order, with their positions, give the same in that order."""
  order = np.random.default_rng(1).permutation(arrays["query"].shape[1])
  moved = dict(arrays, query_positions=order, key_positions=order)
  for name in ("query", "key", "value", "cotangent"):
    moved[name] = arrays[name][:, order]
  actual, wanted = results(attend(moved, options)), results(attend(arrays, options))
  for name in ("output", "query", "key", "value"):
    wanted[name] = wanted[name][:, order]
  return actual, wanted


def reverses_with_its_tables(attend, arrays, options):
  """Distances are signed: sequence and tables reversed together reverse the output."""
  turned = dict(arrays)
  for name in ("query", "key", "value", "cotangent"):
    turned[name] = arrays[name][:, ::-1].copy()
  for name in ("key_table", "value_table"):
    turned[name] = arrays[name][::-1].copy()
  actual, wanted = results(attend(turned, options)), results(attend(arrays, options))
  for name in ("output", "query", "key", "value"):
    wanted[name] = wanted[name][:, ::-1]
  for name in ("key_table", "value_table"):
    wanted[name] = wanted[name][::-1]
  return actual, wanted


def ends_repeat(attend, arrays, options):
  """A clipped table is a longer one whose end rows repeat.

  The gradient of a row is the sum of the gradients of its copies.
  """
  repeats = np.ones(len(arrays["key_table"]), int)
  repeats[[0, -1]] = 9
  first_copies = np.cumsum(repeats) - repeats
  longer = dict(arrays)
  for name in ("key_table", "value_table"):
    longer[name] = np.repeat(arrays[name], repeats, axis=0)
  actual, wanted = results(attend(longer, options)), results(attend(arrays, options))
  for name in ("key_table", "value_table"):
    actual[name] = np.add.reduceat(actual[name], first_copies, axis=0)
  return actual, wanted


def labels_of_distances(attend, arrays, options):
  """Labels that say the clipped distance are the clipped distance."""
  left = len(arrays["key_table"]) // 2
  labels = np.clip(distances(arrays, options), -left, left) + left
  actual = results(attend({**arrays, "labels": labels}, options))
  return actual, results(attend(arrays, options))


def a_sink_is_a_key(attend, arrays, options):
  """The output is as with one more key, with that logit and with zeros as its value."""
  actual, _ = attend(arrays, options)
  longer = {name: values for name, values in arrays.items() if name != "sinks"}
  for name in ("key", "value"):
    longer[name] = np.pad(arrays[name], [(0, 0), (0, 1), (0, 0), (0, 0)])
  heads, keys = arrays["query"].shape[2], arrays["key"].shape[1] + 1
  bias = np.zeros((1, heads, 1, keys), arrays["query"].dtype)
  bias[0, :, 0, -1] = arrays["sinks"]
  wanted, _ = attend({**longer, "bias": bias}, options)
  return {"output": actual}, {"output": wanted}


def low_sinks_change_nothing(attend, arrays, options):
  """Sinks of -inf take no weight."""
  sinks = np.full(arrays["query"].shape[2], -np.inf, arrays["query"].dtype)
  actual = results(attend({**arrays, "sinks": sinks}, options))
  wanted = results(attend(arrays, options))
  return actual, {**wanted, "sinks": np.zeros_like(sinks)}


# These allow no error.
EXACT = depends_on_distances, zero_for_zero, later_keys_get_no_gradient
