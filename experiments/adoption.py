"""Adds relative positions to published models, checks them, and writes results/adoption.md.

  python -m experiments.adoption --flax=FOLDER --nanodo=FOLDER --t5x=FOLDER

The folders are checkouts of github.com/google/flax, google-deepmind/nanodo and google-research/t5x,
which results/adoption/*.patch change.
"""

import functools
import importlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util

from experiments import command
from experiments.errors import InputError
from experiments.evaluation.tables import markdown_table, rewrite_blocks
from experiments.training.environment import environment

_DEVICES, _BATCH, _LENGTH, _VOCAB = 8, 8, 24, 16
_WIDTHS = dict(emb_dim=32, num_heads=4, num_layers=2, qkv_dim=32, mlp_dim=64, max_len=_LENGTH)


class Model(NamedTuple):
  """Parameters, logits of (parameters, tokens), and the same token by token, with a cache."""

  params: dict[str, Any]
  logits: Callable
  decode: Callable | None = None


def _flax_example(class_name, folder, tokens):
  """Returns lm1b's or wmt's model; wmt's translates the tokens into themselves."""
  models = _import(folder, "models")
  config = models.TransformerConfig(_VOCAB, _VOCAB, deterministic=True, **_WIDTHS)
  model, decoder = (getattr(models, class_name)(config.replace(decode=x)) for x in (False, True))
  is_translator = hasattr(model, "encode")
  inputs = (tokens, tokens) if is_translator else (tokens,)

  def logits(params, tokens):
    return model.apply(dict(params=params), *[tokens] * len(inputs))

  def decode(params, tokens):
    context, options = (), dict(mutable=["cache"])
    if is_translator:
      context = model.apply(dict(params=params), tokens, method="encode"), tokens
      options["method"] = "decode"

    def step(cache, t):
      token = models.shift_right(tokens)[:, t : t + 1]
      return decoder.apply(dict(params=params, **cache), *context, token, **options)

    return _one_by_one(step, dict(cache=decoder.init(jax.random.key(0), *inputs)["cache"]))

  params = linen.unbox(model.init(jax.random.key(0), *inputs)["params"])
  return Model(params, logits, decode)


def _gemma(folder, tokens):
  transformer, configs = _import(folder, "transformer", "transformer_cfg")
  config = configs.TransformerConfig(
    **dict(num_layers=2, num_embed=_VOCAB, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8),
    **dict(num_kv_heads=2, final_logit_softcap=None, use_post_attn_norm=False),
    **dict(use_post_ffw_norm=False, attention_types=(configs.AttentionType.GLOBAL,) * 2),
  )
  graph, state, rest = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
  positions = jnp.broadcast_to(jnp.arange(_LENGTH), (_BATCH, _LENGTH))
  mask = jnp.tril(jnp.ones((_BATCH, _LENGTH, _LENGTH), bool))

  def merge(params):
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state, rest)

  def decode(params, tokens):
    def step(cache, t):
      at = slice(t, t + 1)
      return model(tokens[:, at], positions[:, at], cache, mask[:, at])

    model = merge(params)
    return _one_by_one(step, model.init_cache(_LENGTH, _BATCH))

  def logits(params, tokens):
    return merge(params)(tokens, positions, None, mask)[0]

  return Model(nnx.to_pure_dict(state), logits, decode)


def _one_by_one(step, cache):
  steps = []
  for t in range(_LENGTH):
    logits, cache = step(cache, t)
    steps.append(logits)
  return jnp.concatenate(steps, axis=1)


def _nanodo(folder, tokens):
  nanodo = _import(folder, "nanodo.model")
  model = nanodo.TransformerDo(nanodo.DoConfig(D=32, H=4, L=_LENGTH, N=2, V=_VOCAB, F=64))
  params = linen.unbox(model.init(jax.random.key(0), tokens)["params"])
  return Model(params, lambda params, tokens: model.apply(dict(params=params), tokens))


def _t5x(folder, tokens):
  """Returns T5, which translates the tokens into themselves."""
  layers = _import(folder, "layers")
  # network imports them from its package, which would import TensorFlow.
  sys.modules["t5x.examples.t5"] = types.SimpleNamespace(layers=layers)
  network = _import(folder, "network")
  config = network.T5Config(
    **dict(vocab_size=_VOCAB, emb_dim=32, head_dim=8, num_heads=4, mlp_dim=64),
    **dict(num_encoder_layers=2, num_decoder_layers=2, dropout_rate=0.0),
  )
  model = network.Transformer(config)

  def inputs(tokens):
    return tokens, jnp.pad(tokens[:, :-1], ((0, 0), (1, 0))), tokens

  def logits(params, tokens):
    return model.apply(dict(params=params), *inputs(tokens))

  def decode(params, tokens):
    _, shifted, _ = inputs(tokens)
    context = model.apply(dict(params=params), tokens, method="encode")
    options = dict(decode=True, max_decode_length=_LENGTH, mutable=["cache"], method="decode")

    def step(cache, t):
      token = shifted[:, t : t + 1]
      return model.apply(dict(params=params, **cache), context, tokens, token, token, **options)

    cache = model.init(jax.random.key(0), *inputs(tokens), decode=True)["cache"]
    return _one_by_one(step, dict(cache=cache))

  return Model(model.init(jax.random.key(0), *inputs(tokens))["params"], logits, decode)


EXAMPLES = dict(
  lm1b=("flax", "examples/lm1b", functools.partial(_flax_example, "TransformerLM")),
  wmt=("flax", "examples/wmt", functools.partial(_flax_example, "Transformer")),
  gemma=("flax", "examples/gemma", _gemma),
  nanodo=("nanodo", "", _nanodo),
  t5x=("t5x", "t5x/examples/t5", _t5x),
)


def _import(folder, *names):
  """Imports modules of a folder, and forgets them: another folder has others of these names."""
  sys.path.insert(0, str(folder))
  modules = [importlib.import_module(name) for name in names]
  sys.path.remove(str(folder))
  for name, module in [*sys.modules.items()]:
    if str(getattr(module, "__file__", "")).startswith(str(folder)):
      del sys.modules[name]
  return modules if len(names) > 1 else modules[0]


def check(model: Model, original: Model, tokens) -> list[str]:
  """Returns how far a model is from the original, from itself on several devices, and decoding.

  Raises AssertionError: further than rounding, or a table has no gradient.
  """
  flat = traverse_util.flatten_dict(model.params)
  added = [path for path in flat if "tables" in path]
  tables = added or [path for path in flat if "rel_embedding" in path]  # T5 has its own
  zeros = flat | {path: jnp.zeros_like(flat[path]) for path in added}
  kept = {path: zeros[path] for path in traverse_util.flatten_dict(original.params)}
  started = model.logits(traverse_util.unflatten_dict(zeros), tokens)
  before = original.logits(traverse_util.unflatten_dict(kept), tokens)

  @jax.jit
  def gradients(params, tokens):
    def loss(params):
      return -jax.nn.log_softmax(model.logits(params, tokens))[..., 0].mean()

    return traverse_util.flatten_dict(jax.grad(loss)(params))

  mesh = jax.make_mesh((_DEVICES,), ("data",), (jax.sharding.AxisType.Auto,))
  one = gradients(model.params, tokens)
  shards = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
  several = gradients(jax.device_put(model.params, jax.NamedSharding(mesh, jax.P())), shards)
  assert tables and all(jnp.abs(one[path]).max() > 0 for path in tables), "a table has no gradient"
  figures = [_apart(before, started), max(_apart(one[x], jax.device_get(several[x])) for x in one)]
  if model.decode:
    figures.append(_apart(model.decode(model.params, tokens), model.logits(model.params, tokens)))
  assert max(figures) < 1e-4, f"the model differs: {figures}"
  return [f"{x:.0e}" for x in figures] + ["no cache"] * (3 - len(figures))


def _apart(a, b) -> float:
  return float(jnp.abs(a - b).max())


def lines_of(patch: pathlib.Path) -> str:
  """Returns the lines added and removed by a patch."""
  lines = [line[0] for line in patch.read_text("utf-8").splitlines()[2:] if line]
  return f"[+{lines.count('+')} -{lines.count('-')}]({patch.parent.name}/{patch.name})"


def main(out: pathlib.Path, **folders: str) -> None:
  """Checks all models and rewrites their table."""
  jax.config.update("jax_num_cpu_devices", _DEVICES)
  tokens = jax.random.randint(jax.random.key(7), (_BATCH, _LENGTH), 1, _VOCAB)
  rows = []
  for name, (source, inside, load) in EXAMPLES.items():
    folder, patch = pathlib.Path(folders[source]).resolve(), out / f"adoption/{name}.patch"
    if not (folder / inside).is_dir():
      raise InputError(f"--{source}: {folder} has no {inside}: give a checkout")
    with tempfile.TemporaryDirectory() as changed:
      copy = pathlib.Path(changed, inside)
      shutil.copytree(folder / inside, copy, dirs_exist_ok=True)
      subprocess.run(["patch", "-p1", "-s", "-i", patch.resolve()], cwd=changed, check=True)
      models = load(copy, tokens), load(folder / inside, tokens)
      rows.append([name, lines_of(patch), *check(*models, tokens)])
  header = ["model", "lines", "tables of zeros, and the original"]
  header += [f"gradients on {_DEVICES} devices, and on one", "decoded, and the full pass"]
  about, table = environment(), markdown_table(header, rows)
  versions = ", ".join(f"{x} {about['packages'][x]}" for x in ("jax", "flax"))
  note = f"{about['date'][:10]}, {about['devices']}, {versions}."
  rewrite_blocks(out / "adoption.md", dict(adoption=f"{table}\n\n{note}"))
  print(table)


FLAGS = {name: command.Flag("", f"a checkout of {name}") for name in ("flax", "nanodo", "t5x")}
FLAGS["out"] = command.Flag("results", "the folder of the page", is_path=True)

if __name__ == "__main__":
  command.run(main, FLAGS)
