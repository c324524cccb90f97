r"""Measures what relative attention of long music needs in memory, with no need to have it.

  python -m experiments.memory --lengths=512,2048,8192,65536 --out=results
  python -m experiments.memory --lengths= --step_lengths=16384,32768,65536 --out=results
  python -m experiments.memory --lengths= --out=results   # measures nothing, writes the report

Music Transformer's setting (Huang et al. 2018): keys alone, a table for each head, causal, nothing
beyond half the length. One layer's attention is compiled for each of --lengths, gathered
(`per_position`), skewed (`skew`) and by blocks (`chunked`), each with the relative term and
without, forward alone and with gradients; nothing of it runs. Memory is what the compiler sets
aside beyond arguments and results.

Then one step of training runs, of a whole model on one sequence of random tokens, at the longest of
--step_lengths whose program fits into the memory there is.

Writes OUT/music/memory.json, OUT/music/step.json, a picture, and the section of OUT/music.md.
"""

import functools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments import command
from experiments.benchmarks.measurement import free_bytes
from experiments.reports import music
from relpos_jax import RelativePositions, dot_product_attention
from relpos_jax.attention.inputs import gather_inputs
from relpos_jax.attention.reference import vectors
from relpos_jax.data import voices
from relpos_jax.data.batching import Tokens
from relpos_jax.data.tokenizer import BOS
from relpos_jax.errors import InputError
from relpos_jax.evaluation.cost import compile_program, with_gradients
from relpos_jax.models.language_model import LanguageModel, LanguageModelConfig
from relpos_jax.training.loss import language_loss
from relpos_jax.training.step import init_state, make_train_step
from relpos_jax.training.workdir import environment, write_whole

IMPLEMENTATIONS = ("per_position", "skew", "chunked")

FLAGS = dict(
  lengths=command.Flag(
    "512,1024,2048,4096,8192,16384,32768,65536", "L, separated by commas; one layer is compiled"
  ),
  step_lengths=command.Flag("", "lengths to try a step of training at, the longest that fits"),
  heads=command.Flag(8, "of attention"),
  width=command.Flag(64, "of a head; D is heads times width"),
  layers=command.Flag(6, "of the model that makes a step of training"),
  out=command.Flag("results", "the folder to write to"),
)


def main(lengths: str, step_lengths: str, heads: int, width: int, layers: int, out: str) -> None:
  """Checks the flags, compiles, makes the step, and writes the report."""
  for flag, value in (("heads", heads), ("width", width), ("layers", layers)):
    if value < 1:
      raise InputError(f"--{flag} is {value}; want at least 1")
  compiled = command.lengths("lengths", lengths)
  tried = command.lengths("step_lengths", step_lengths)
  if tried and heads * width % 2:
    raise InputError(f"--heads={heads} times --width={width} is odd: give an even --width")
  folder = command.make_folder(pathlib.Path(out, "music"), "out")
  settings = dict(heads=heads, width=width)
  if compiled:
    rows = [*measure(compiled, **settings)]  # all of them, before the older ones are written over
    _write(folder / "memory.json", settings=settings, rows=rows)
  if tried:
    _write(folder / "step.json", **_step(tried, heads, width, layers))
  music.write(pathlib.Path(out))


def _write(file: pathlib.Path, **results: Any) -> None:
  write_whole(file, json.dumps(dict(environment=environment()) | results) + "\n")


# One layer's attention ----------------------------------------------------------------------------


def measure(lengths: Sequence[int], heads: int, width: int) -> Iterator[dict[str, Any]]:
  """A row for each length: bytes by the paper's count, and by the compiler's of each program."""
  for length in lengths:
    programs = []
    for name in IMPLEMENTATIONS:
      for has_relations in (True, False):
        for backward in (False, True):
          _say(f"compiling L = {length:,}: {name}")
          kind = dict(implementation=name, relations=has_relations, backward=backward)
          size = _temporary_bytes(name, length, heads, width, has_relations, backward)
          programs.append(kind | dict(temporary_bytes=size))
    yield dict(length=length, counts=_counts(length, heads, width), programs=programs)


def _arguments(length: int, heads: int, width: int):
  """Shapes of query, key, value and of a table of distances up to L / 2."""
  tokens = jax.ShapeDtypeStruct((1, length, heads, width), jnp.float32)
  table = jax.ShapeDtypeStruct((2 * (length // 2) + 1, heads, width), jnp.float32)
  return tokens, tokens, tokens, table


def _temporary_bytes(
  name: str, length: int, heads: int, width: int, has_relations: bool, backward: bool
) -> int:
  def attention(query, key, value, table=None):
    relations = None if table is None else RelativePositions(table, None, beyond="zero")
    return dot_product_attention(
      query, key, value, relations=relations, is_causal=True, implementation=name
    )

  arguments = _arguments(length, heads, width)[: 4 if has_relations else 3]
  if backward:
    arguments = (arguments[0], *arguments)  # the cotangent is like the result
  function = with_gradients(attention) if backward else attention
  return compile_program(function, *arguments).temporary_bytes


def _counts(length: int, heads: int, width: int) -> dict[str, int]:
  """Bytes of what the paper counts: relative embeddings, gathered or not, and relative logits."""

  def gathered(query, key, value, table):
    relations = RelativePositions(table, None, beyond="zero")
    inputs = gather_inputs(query, key, value, relations=relations, is_causal=True)
    return vectors(inputs.relations.key, inputs.edges())

  shapes = _arguments(length, heads, width)
  logits = jax.ShapeDtypeStruct((heads, length, length), jnp.float32)
  return dict(
    gathered=_bytes(jax.eval_shape(gathered, *shapes)),
    table=_bytes(shapes[3]),
    logits=_bytes(logits),
  )


def _bytes(shape: jax.ShapeDtypeStruct) -> int:
  return shape.size * shape.dtype.itemsize


# A step of training -------------------------------------------------------------------------------


def _step(lengths: Sequence[int], heads: int, width: int, layers: int) -> dict[str, Any]:
  """The settings, what the step at the longest length that fits took, and what was too long."""
  too_long = []
  for length in sorted(set(lengths), reverse=True):
    _say(f"compiling a step of training at L = {length:,}")
    config = step_config(length, heads, width, layers)
    init, step, state = make_step(config)
    shape = jax.ShapeDtypeStruct((1, length), jnp.int32)
    program = compile_program(step, state, Tokens(shape))
    found = dict(length=length, bytes_needed=program.bytes_needed)
    if program.bytes_needed > (free := free_bytes()):
      too_long.append(found | dict(free_bytes=free))
      continue
    _say(f"running it; it needs {program.bytes_needed / 1e9:,.1f} GB")
    random = np.random.default_rng(0).integers(voices.SILENCE, voices.VOCAB_SIZE, shape.shape)
    state, start = jax.block_until_ready(jax.jit(init)()), time.perf_counter()
    tokens = Tokens(jnp.asarray(random, jnp.int32))
    _, metrics = jax.block_until_ready(program.run(state, tokens))
    return found | dict(
      settings=_settings(config),
      seconds=time.perf_counter() - start,
      loss=float(metrics["loss"]),
      peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
      too_long=too_long,
    )
  raise InputError(
    f"--step_lengths: none fits, the shortest needs {too_long[-1]['bytes_needed'] / 1e9:,.1f} GB "
    f"of {too_long[-1]['free_bytes'] / 1e9:,.1f}; give shorter ones"
  )


def _settings(config: LanguageModelConfig) -> dict[str, Any]:
  return dict(
    heads=config.num_heads,
    width=config.width // config.num_heads,
    layers=config.num_layers,
    dropout=config.dropout_rate,
    dtype=config.dtype,
  )


def step_config(length: int, heads: int, width: int, layers: int) -> LanguageModelConfig:
  """The model that makes a step of training: Music Transformer's relation, by blocks."""
  return LanguageModelConfig(
    voices.VOCAB_SIZE,
    num_layers=layers,
    width=heads * width,
    num_heads=heads,
    feed_forward=2 * heads * width,
    positions="both",
    max_distance=length // 2,
    relative_values=False,
    beyond="zero",
    implementation="chunked",
  )


def make_step(config: LanguageModelConfig):
  """What makes the state, what makes a step of it by Adam, and the state's shapes."""
  make = lambda: LanguageModel(config, rngs=nnx.Rngs(0))
  optimizer = optax.adam(1e-4)
  init = lambda: init_state(nnx.state(make()), optimizer)
  step = make_train_step(
    nnx.graphdef(nnx.eval_shape(make)),
    functools.partial(language_loss, bos=BOS),
    optimizer,
    dropout_key=jax.random.key(0),
  )
  return init, step, jax.eval_shape(init)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
  command.run(main, FLAGS)
