r"""Exports a trained translator for CTranslate2, which runs in C++ on CPUs and GPUs.

  pip install -e '.[export]'
  python -m experiments.train --config=configs/quickstart.py --workdir=runs/shared \
      --config.model.tables_per_head=False
  python -m experiments.export --workdir=runs/shared --out=translator

The exported model contains the vocabulary. In Python it translates by:

  import ctranslate2
  import tokenizers

  tokenizer = tokenizers.Tokenizer.from_file("runs/shared/tokenizer.json")
  translator = ctranslate2.Translator("translator")
  source = tokenizer.encode("The old teacher reads a book.").tokens  # ends in </s>
  (result,) = translator.translate_batch([source])
  target = [tokenizer.token_to_id(token) for token in result.hypotheses[0]]
  print(tokenizer.decode(target))

CTranslate2's relative positions are clipped at one distance on both sides, and all
heads share a table: train with --config.model.tables_per_head=False. Greedy
translations equal this project's, up to rounding. Beam search has another length
penalty: CTranslate2 divides by length**alpha, this project by
((5 + length) / 6)**alpha.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from experiments import command
from experiments.errors import InputError
from experiments.files import Path

if TYPE_CHECKING:
  from flax import nnx

  from experiments.training.run import Run
  from relpos_jax.models.layers import Layer
  from relpos_jax.nn.attention import MultiHeadAttention

FLAGS = dict(
  workdir=command.WORKDIR,
  out=command.Flag(None, "the folder to write to, which must not exist", is_path=True),
)

# The values of config.model that CTranslate2 supports.
_NEEDED = dict(
  positions="relative",
  positions_in="all",
  tables_per_head=False,
  relative_keys=True,
  relative_values=True,
  beyond="clip",
  left=-1,
)


def main(workdir: Path, out: Path) -> None:
  """Writes the model of a run for CTranslate2."""
  if out.exists():
    raise InputError(f"{out} exists already: give another --out, or delete it")
  from experiments.systems import load_config
  from experiments.translation.train import load_run

  config = load_config(workdir, "translation")
  check_exportable(config)
  spec = ctranslate2_spec(load_run(config, workdir))
  command.make_folder(out, "out")
  spec.save(str(out))
  print(f"wrote {out}")


def check_exportable(config: ConfigDict) -> None:
  """Raises InputError unless CTranslate2 is installed and supports a config."""
  for key, needed in _NEEDED.items():
    value = config.model[key]
    if value != needed:
      problem = f"config.model.{key} is {value!r}, and CTranslate2 has only {needed!r}"
      raise InputError(f"{problem}: train with --config.model.{key}={needed}")
  if not importlib.util.find_spec("ctranslate2"):
    raise InputError("CTranslate2 is not installed: pip install -e '.[export]'")


def ctranslate2_spec(run: "Run") -> Any:
  """Converts the model of a run to a specification of CTranslate2."""
  from ctranslate2.specs import common_spec, transformer_spec
  from flax import nnx

  config, model = run.config.model, nnx.merge(run.graphdef, run.params)
  spec = transformer_spec.TransformerSpec.from_config(
    (config.num_layers, config.num_layers),
    config.num_heads,
    pre_norm=config.norm == "pre",
    activation=common_spec.Activation.RELU,
    with_relative_position=True,
  )
  spec.config.layer_norm_epsilon = 1e-6
  spec.config.decoder_start_token = "<s>"
  spec.encoder.embeddings[0].weight = _array(model.source_embedding.table)
  spec.decoder.embeddings.weight = _array(model.target_embedding.table)
  spec.decoder.projection.weight = _array(model.softmax.table)
  _stack(spec.encoder, model.encoder)
  _stack(spec.decoder, model.decoder)
  vocabulary = run.vocabulary.get_vocab()
  tokens = sorted(vocabulary, key=vocabulary.get)
  spec.register_source_vocabulary(tokens)
  spec.register_target_vocabulary(tokens)
  spec.validate()
  spec.optimize(quantization=None)
  return spec


def _stack(spec: Any, stack: "nnx.Module") -> None:
  if hasattr(spec, "layer_norm"):  # post-norm stacks have no final norm
    _norm(spec.layer_norm, stack.norm)
  for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
    _layer(layer_spec, layer)


def _layer(spec: Any, layer: "Layer") -> None:
  _attention(spec.self_attention, layer.self_attention, ["query", "key", "value"])
  tables = layer.self_attention.tables()
  spec.self_attention.relative_position_keys = np.asarray(tables.key, np.float32)
  spec.self_attention.relative_position_values = np.asarray(tables.value, np.float32)
  _norm(spec.self_attention.layer_norm, layer.residuals[0].norm)
  if layer.cross_attention is not None:
    _attention(spec.attention, layer.cross_attention, ["query"], ["key", "value"])
    _norm(spec.attention.layer_norm, layer.residuals[1].norm)
  _linear(spec.ffn.linear_0, layer.feed_forward.hidden)
  _linear(spec.ffn.linear_1, layer.feed_forward.out)
  _norm(spec.ffn.layer_norm, layer.residuals[-1].norm)


def _linear(spec: Any, projection: "nnx.Linear") -> None:
  spec.weight = np.ascontiguousarray(_array(projection.kernel).T)
  spec.bias = _array(projection.bias)


def _attention(spec: Any, layer: "MultiHeadAttention", *together: list[str]) -> None:
  """Copies the projections of attention.

  CTranslate2 joins some of them: each list in `together` names the projections that
  become one matrix.
  """
  for linear, names in zip(spec.linear, together, strict=False):
    kernels = [_array(getattr(layer, name).kernel) for name in names]
    flat = [kernel.reshape(len(kernel), -1) for kernel in kernels]
    linear.weight = np.ascontiguousarray(np.concatenate(flat, axis=1).T)
  kernel = _array(layer.out.kernel)
  spec.linear[-1].weight = np.ascontiguousarray(kernel.reshape(-1, kernel.shape[-1]).T)


def _norm(spec: Any, norm: "nnx.LayerNorm") -> None:
  spec.gamma, spec.beta = _array(norm.scale), _array(norm.bias)


def _array(parameter: "nnx.Param") -> np.ndarray:
  return np.ascontiguousarray(parameter[...], np.float32)


if __name__ == "__main__":
  command.run(main, FLAGS)
