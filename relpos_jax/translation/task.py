"""Translation: sentence pairs, two tokenizers, an encoder and a decoder, BLEU."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from relpos_jax.config import at_least, check_values
from relpos_jax.data.batching import Batch, Batches, pair_lengths
from relpos_jax.data.ragged import Ragged
from relpos_jax.data.tokenizer import (
  BOS,
  KINDS,
  UNK,
  Tokenizers,
  encode_pairs,
  load_tokenizers,
  save_tokenizers,
  tokenizer_files,
  train_tokenizer,
)
from relpos_jax.errors import InputError
from relpos_jax.evaluation.bleu import join_subwords
from relpos_jax.models.seq2seq import Transformer, TransformerConfig
from relpos_jax.training import task as tasks
from relpos_jax.training.loss import Loss, cross_entropy, shift_right
from relpos_jax.training.processes import is_first
from relpos_jax.training.progress import track
from relpos_jax.training.sharding import AnyMesh
from relpos_jax.training.task import Evaluation, Run, model_choices, model_values, refusals_named
from relpos_jax.translation import scores
from relpos_jax.translation.corpus import SOURCES, Corpus, load_corpus
from relpos_jax.translation.normalize import normalize_corpus, normalize_lines
from relpos_jax.translation.translator import Translator
from relpos_jax.typing import PyTree

_CHOICES = {
  "data.source": SOURCES,
  "vocabulary.kind": KINDS,
  # Those of sacreBLEU that need no further package or download.
  "evaluation.tokenize": ("13a", "intl", "zh", "char", "none"),
} | model_choices(TransformerConfig)
_NUMBERS = (
  *tasks.TOKEN_CHECKS,
  at_least(1, "training.num_samples", "decoding.beam_size"),
  at_least(0, "decoding.length_penalty", "decoding.extra_length"),
  at_least(UNK + 2, "vocabulary.size"),  # a word besides
)
_NUM_MOCKED = 100_000


class _Entries(NamedTuple):
  """A tokenizer's number of entries, without them."""

  number: int

  def get_vocab_size(self) -> int:
    return self.number


class Translation:
  """The `Task` of translating sentences."""

  score = "BLEU"

  def __init__(self, config: ConfigDict):
    self.config = config

  def check(self, sizes: Mapping[str, int]) -> None:
    check_values(self.config, _CHOICES, _NUMBERS)
    check_beam(self.config)
    _check_languages(self.config.data)
    _check_subwords(self.config)
    if self.config.model.share_embeddings and not self.config.vocabulary.joint:
      raise InputError(
        "config.model.share_embeddings needs one vocabulary for both languages: "
        "set config.vocabulary.joint=True or config.model.share_embeddings=False"
      )
    tasks.check_batches(self.config, sizes)
    _check_model(self.config)

  def load_data(self) -> Corpus:
    """The sentence pairs of `config.data`, normalised as it says."""
    data = self.config.data
    options = data[data.source].to_dict()
    if data.source in ("multi30k", "wmt14"):
      options["languages"] = data.languages
    corpus = load_corpus(data.source, **options)
    if "valid" not in corpus.splits:
      raise InputError(
        "no validation pairs: give --config.data.pairs.valid=source_file,target_file"
      )
    _check_mark(self.config.evaluation.subword_mark, corpus)
    if data.moses or data.lowercase:
      corpus = normalize_corpus(corpus, data.languages, moses=data.moses, lowercase=data.lowercase)
    return corpus

  def learn_vocabulary(self, data: Corpus, workdir: pathlib.Path) -> Tokenizers:
    """Those of the run's folder, or new ones, as `config.vocabulary` says.

    Half a vocabulary, of a run that was killed while writing it, is learned anew; InputError if
    there is a checkpoint already.
    """
    if tokenizer_files(workdir) or any(workdir.glob("checkpoints/[0-9]*")):
      return load_tokenizers(workdir)
    return self.learn_tokenizers(data)

  def learn_tokenizers(self, data: Corpus) -> Tokenizers:
    """Trains the vocabularies of `config.vocabulary` on the training split."""
    train, vocabulary = data.splits["train"], self.config.vocabulary
    learn = functools.partial(train_tokenizer, kind=vocabulary.kind, size=vocabulary.size)
    if vocabulary.joint:
      joint = learn(line for pair in train for line in pair)
      return Tokenizers(joint, joint)
    return Tokenizers(*(learn(pair[side] for pair in train) for side in (0, 1)))

  def load_vocabulary(self, workdir: pathlib.Path) -> Tokenizers:
    return load_tokenizers(workdir)

  def save_vocabulary(self, vocabulary: Tokenizers, workdir: pathlib.Path) -> None:
    if not tokenizer_files(workdir):
      save_tokenizers(vocabulary, workdir)

  def mock_vocabulary(self) -> Tokenizers:
    return Tokenizers(*2 * [_Entries(self.config.vocabulary.size)])

  def make_batches(
    self, data: Corpus, vocabulary: Tokenizers, mesh: AnyMesh
  ) -> tuple[Batches, Batches]:
    train, valid = (encode_pairs(vocabulary, data.splits[name]) for name in ("train", "valid"))
    make = tasks.batch_maker(self.config, pair_lengths(*train), mesh)
    return make(*train, seed=self.config.seed), make(*valid, seed=None)

  def mock_batches(self, mesh: AnyMesh) -> Batches:
    """Pairs of log-normal lengths around 24 tokens, the target's by a fifth longer or shorter.

    Not those of any corpus, whose boundaries will differ by some tokens.
    """
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(24), 0.6, _NUM_MOCKED)
    sides = lengths, lengths * random.lognormal(0, 0.2, _NUM_MOCKED)
    rows = [np.clip(side, 2, None).astype(int) for side in sides]
    pairs = [Ragged.joined(np.full(side.sum(), UNK, np.uint16), side) for side in rows]
    return tasks.batch_maker(self.config, pair_lengths(*pairs), mesh)(*pairs, seed=self.config.seed)

  def empty_batch(self, shape: tuple[int, ...]) -> Batch:
    return Batch(*2 * [np.zeros(shape, np.int32)])

  def make_model(self, vocabulary: Tokenizers, rngs: nnx.Rngs) -> Transformer:
    sizes = (tokenizer.get_vocab_size() for tokenizer in vocabulary)
    return Transformer(transformer_config(self.config, *sizes), rngs=rngs)

  def loss(self, model: Transformer, batch: Batch, rngs: nnx.Rngs | None = None) -> Loss:
    smoothing = self.config.training.label_smoothing
    return translation_loss(model, batch, rngs, bos=BOS, label_smoothing=smoothing)

  def make_report(self, run: Run, data: Corpus, batches: Any):
    """BLEU of greedy translations of some sentences, and a few of them."""
    translate = make_translator(run, beam_size=1)
    some = data.splits["valid"][: self.config.training.num_samples]

    def report(params: PyTree) -> tuple[dict[str, float], str]:
      translations = translate([source for source, _ in some], params)
      return scores.in_short(self.config, some, translations)

    return report

  def evaluate(self, run: Run, data: Corpus, workdir: pathlib.Path) -> Evaluation | None:
    """Translates the test splits, and writes the translations into the run's folder."""
    splits = {name: data.splits[name] for name in ("test", "long") if name in data.splits}
    shown = functools.partial(track, what="batches translated") if is_first() else iter
    scored = scores.translate(make_translator(run, track=shown), splits)
    return scores.evaluation(run, scored, workdir) if is_first() else None


def translation_loss(
  model: Transformer,
  batch: Batch,
  rngs: nnx.Rngs | None = None,
  *,
  bos: int,
  label_smoothing: float = 0.0,
) -> Loss:
  """The loss of the target's tokens, each told from the source and the target before it."""
  logits = model(batch.source, shift_right(batch.target, bos), rngs=rngs)
  return cross_entropy(logits, batch.target, smoothing=label_smoothing)


def transformer_config(
  config: ConfigDict, source_vocab_size: int, target_vocab_size: int
) -> TransformerConfig:
  """The model's own config, of `config.model`."""
  return TransformerConfig(source_vocab_size, target_vocab_size, **model_values(config))


def make_translator(run: Run, **changes) -> Translator:
  """Translates as `config.decoding` says, but for the changes, on the run's devices."""
  check_beam(run.config, changes.get("beam_size"))
  options = run.config.decoding.to_dict() | changes
  del options["average_checkpoints"]
  return Translator(run.graphdef, run.params, run.vocabulary, mesh=run.mesh, **options)


def check_beam(config: ConfigDict, beam_size: int | None = None) -> None:
  """At most as many hypotheses as there are words to begin with; InputError for more.

  `beam_size`: that of the flag, where it is given; the config's otherwise.
  """
  own, most = config.decoding.beam_size, config.vocabulary.size
  said = f"--beam_size={beam_size}" if beam_size else f"config.decoding.beam_size is {own}"
  if (beam_size or own) > most:
    raise InputError(f"{said}: give at most {most}, config.vocabulary.size")


def normalize_input(config: ConfigDict, lines: list[str]) -> list[str]:
  """Lines of the source language as the model saw them in training."""
  data = config.data
  if not (data.moses or data.lowercase):
    return lines
  language = data.languages.partition("-")[0]
  return normalize_lines(lines, language, moses=data.moses, lowercase=data.lowercase)


def _check_mark(mark: str, corpus: Corpus) -> None:
  if mark and all(join_subwords(target, mark) == target for _, target in corpus.splits["train"]):
    raise InputError(
      f"config.evaluation.subword_mark is {mark!r}, in which no training target's subword ends: "
      "give the mark that is in the text, or none"
    )


def _check_languages(data: ConfigDict) -> None:
  if not re.fullmatch("[a-z]{2,3}-[a-z]{2,3}", data.languages):
    raise InputError(f"config.data.languages is {data.languages!r}: give from-to, as en-de")
  if data.source == "embedded" and data.languages != "en-de":
    raise InputError(f"config.data.languages is {data.languages!r}: the embedded corpus is en-de")


def _check_subwords(config: ConfigDict) -> None:
  mark, prepared = config.evaluation.subword_mark, scores.is_prepared(config)
  if re.search(r"\s", mark):
    raise InputError(
      f"config.evaluation.subword_mark is {mark!r}: give what stands before the space, as @@"
    )
  if prepared and not mark:
    raise InputError(
      "config.data.multi30k.prepared is text in subwords: set config.evaluation.subword_mark=@@"
    )
  if mark and config.data.moses:
    raise InputError(
      f"config.data.moses would part {mark} from its subword: set config.data.moses=False, "
      "or config.evaluation.subword_mark to nothing"
    )


def _check_model(config: ConfigDict) -> None:
  """Traces training without computing: what the operator refuses, it refuses here."""
  with refusals_named():
    one_layer = dataclasses.replace(transformer_config(config, 8, 8), num_layers=1)  # all are alike
    _trace(one_layer, config.batches.max_length)


@functools.cache  # for the cells of a sweep: many have one model
def _trace(config: TransformerConfig, length: int) -> None:
  def run(tokens):
    model = Transformer(config, rngs=nnx.Rngs(0))
    return model(tokens, tokens, rngs=nnx.Rngs(dropout=0))

  jax.eval_shape(run, jax.ShapeDtypeStruct((1, length), jnp.int32))
