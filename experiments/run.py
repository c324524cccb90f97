"""From a config to the parts of a run, and from a run's folder back to them."""

import functools
import pathlib
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from experiments.validation import check_types, model_config
from relpos_jax.data.batching import Batches, bucket_boundaries, pair_lengths
from relpos_jax.data.corpus import Corpus, load_corpus
from relpos_jax.data.normalize import normalize_corpus, normalize_lines
from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import Tokenizers, encode, load_tokenizers, train_tokenizer
from relpos_jax.decoding.translator import Translator
from relpos_jax.errors import InputError
from relpos_jax.evaluation.bleu import join_subwords
from relpos_jax.models.seq2seq import Transformer
from relpos_jax.training.checkpoint import Checkpoints
from relpos_jax.training.sharding import (
  AnyMesh,
  make_mesh,
  num_rows_together,
  put_parameters,
  shapes_on,
)
from relpos_jax.training.workdir import read_json


class Run(NamedTuple):
  """A model, trained or not, and what belongs to it."""

  config: ConfigDict
  tokenizers: Tokenizers
  mesh: jax.sharding.Mesh
  graphdef: nnx.GraphDef
  params: nnx.State  # arrays, or shapes while there are none


def load_data(config: ConfigDict) -> Corpus:
  """The sentence pairs of `config.data`, normalised as it says."""
  data = config.data
  options = data[data.source].to_dict()
  if data.source in ("multi30k", "wmt14"):
    options["languages"] = data.languages
  corpus = load_corpus(data.source, **options)
  if "valid" not in corpus.splits:
    raise InputError("no validation pairs: give --config.data.pairs.valid=source_file,target_file")
  _check_mark(config.evaluation.subword_mark, corpus)
  if data.moses or data.lowercase:
    corpus = normalize_corpus(corpus, data.languages, moses=data.moses, lowercase=data.lowercase)
  return corpus


def _check_mark(mark: str, corpus: Corpus) -> None:
  if mark and all(join_subwords(target, mark) == target for _, target in corpus.splits["train"]):
    raise InputError(
      f"config.evaluation.subword_mark is {mark!r}, in which no training target's subword ends: "
      "give the mark that is in the text, or none"
    )


def normalize_input(config: ConfigDict, lines: list[str]) -> list[str]:
  """Lines of the source language as the model saw them in training."""
  data = config.data
  if not (data.moses or data.lowercase):
    return lines
  language = data.languages.partition("-")[0]
  return normalize_lines(lines, language, moses=data.moses, lowercase=data.lowercase)


def learn_tokenizers(config: ConfigDict, corpus: Corpus) -> Tokenizers:
  """Trains the vocabularies of `config.vocabulary` on the training split."""
  train = corpus.splits["train"]
  learn = functools.partial(
    train_tokenizer, kind=config.vocabulary.kind, size=config.vocabulary.size
  )
  if config.vocabulary.joint:
    joint = learn(line for pair in train for line in pair)
    return Tokenizers(joint, joint)
  return Tokenizers(*(learn(pair[side] for pair in train) for side in (0, 1)))


def make_batches(
  config: ConfigDict, corpus: Corpus, tokenizers: Tokenizers, mesh: AnyMesh
) -> tuple[Batches, Batches]:
  """Batches of the training split, endless and shuffled, and of the valid split, in order."""
  train, valid = (encode_pairs(tokenizers, corpus.splits[name]) for name in ("train", "valid"))
  make = batch_maker(config, pair_lengths(*train), mesh)
  return make(*train, seed=config.seed), make(*valid, seed=None)


def batch_maker(config: ConfigDict, lengths: np.ndarray, mesh: AnyMesh):
  """`Batches` of `config.batches`, with the shapes that fit training pairs of these lengths."""
  boundaries = bucket_boundaries(
    lengths,
    config.batches.num_shapes,
    max_length=config.batches.max_length,
    multiple_of=mesh.shape["sequence"],
  )
  return functools.partial(
    Batches,
    boundaries=boundaries,
    token_budget=config.batches.tokens,
    multiple_of=num_rows_together(mesh.shape) * config.training.num_microbatches,
  )


def encode_pairs(tokenizers: Tokenizers, pairs) -> tuple[Ragged, Ragged]:
  """Token ids of both sides, ending in EOS, without the space around lines, as translating does."""
  return tuple(
    encode(tokenizer, (pair[side].strip() for pair in pairs))
    for side, tokenizer in enumerate(tokenizers)
  )


def plan_run(config: ConfigDict, tokenizers: Tokenizers) -> Run:
  """The model of `config.model` on the devices of `config.mesh`, parameters still shapes."""
  graphdef, shapes = plan_model(config, *_vocab_sizes(tokenizers))
  mesh = make_mesh(**config.mesh)
  return Run(config, tokenizers, mesh, graphdef, shapes_on(mesh, shapes))


def plan_model(
  config: ConfigDict, source_vocab_size: int, target_vocab_size: int
) -> tuple[nnx.GraphDef, nnx.State]:
  """The model of `config.model`, and its parameters' shapes."""
  return nnx.split(nnx.eval_shape(_model(config, source_vocab_size, target_vocab_size)))


def init_params(run: Run) -> nnx.State:
  """Random parameters, a function of `config.seed` alone."""
  init = lambda key: nnx.state(_model(run.config, *_vocab_sizes(run.tokenizers), key)())
  return put_parameters(jax.jit(init)(jax.random.key(run.config.seed)), run.mesh)


def _vocab_sizes(tokenizers: Tokenizers) -> tuple[int, ...]:
  return tuple(tokenizer.get_vocab_size() for tokenizer in tokenizers)


def _model(config: ConfigDict, source_vocab_size: int, target_vocab_size: int, seed=0):
  values = model_config(config, source_vocab_size, target_vocab_size)
  return lambda: Transformer(values, rngs=nnx.Rngs(seed))


def load_run(workdir: str | pathlib.Path) -> Run:
  """The run in a folder, with the mean of its last checkpoints' parameters, on all devices.

  Raises:
    InputError: no run there, or a part of it is missing or damaged.
  """
  config = _load_config(pathlib.Path(workdir, "config.json"))
  config.mesh = default.get_config().mesh
  return with_average(plan_run(config, load_tokenizers(workdir)), workdir)


def _load_config(path: pathlib.Path) -> ConfigDict:
  if not path.is_file():
    raise InputError(f"no training run in {str(path.parent)!r}: give its --workdir")
  config = default.get_config()  # whose values are those of keys younger than the run
  with config.ignore_type():
    config.update(read_json(path))
  check_types(config, default.get_config())
  return config


def with_average(run: Run, workdir: str | pathlib.Path) -> Run:
  """The run with the mean of the parameters in its last checkpoints."""
  with Checkpoints(pathlib.Path(workdir, "checkpoints")) as checkpoints:
    num = run.config.decoding.average_checkpoints
    return run._replace(params=checkpoints.average(num, like=run.params))


def make_translator(run: Run, **changes) -> Translator:
  """Translates as `config.decoding` says, but for the changes, on the run's devices."""
  options = run.config.decoding.to_dict() | changes
  del options["average_checkpoints"]
  return Translator(run.graphdef, run.params, run.tokenizers, mesh=run.mesh, **options)
