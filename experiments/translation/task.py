"""Translation: sentence pairs, a tokenizer, an encoder and a decoder, BLEU."""

import functools
import itertools
import re
import sys
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from experiments.config import LARGEST, between, check_values
from experiments.data import tokenizer as tok
from experiments.data.batching import Batch, Batches, pair_lengths
from experiments.errors import InputError
from experiments.evaluation import bleu
from experiments.files import Path, write_whole
from experiments.training import task as tasks
from experiments.training.metrics import track
from experiments.training.processes import is_first
from experiments.training.sharding import AnyMesh
from experiments.training.task import Evaluation, Loss, Run
from experiments.translation import corpus as corpora
from experiments.translation import scores, wmt14
from experiments.translation.corpus import LANGUAGES, Corpus
from experiments.translation.translator import Translator
from relpos_jax.models.seq2seq import Transformer, TransformerConfig
from relpos_jax.typing import Int, PyTree

_CHOICES = {
  "data.source": tuple(LANGUAGES),
  "vocabulary.kind": tok.KINDS,
  "decoding.stop": ("present", "bound"),
  # The tokenizers of sacreBLEU that need no download.
  "evaluation.tokenize": ("13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "none"),
} | tasks.model_choices(TransformerConfig)
_NUMBERS = (
  *tasks.TOKEN_CHECKS,
  between(1, LARGEST, "training.num_samples"),
  between(1, 20_000, "data.embedded.train_size"),
  between(1, 1024, "decoding.beam_size"),
  between(0, LARGEST, "decoding.length_penalty", "decoding.extra_length"),
  between(tok.UNK + 2, LARGEST, "vocabulary.size"),  # the special tokens and one word
)
_LOADERS = dict(
  embedded=corpora.load_embedded,
  multi30k=corpora.load_multi30k,
  pairs=corpora.load_pairs,
  scan=corpora.load_scan,
  wmt14=wmt14.load,
)


class Translation(tasks.Task):
  """The `Task` of translation."""

  score = "BLEU"

  def check(self, sizes: Mapping[str, int]) -> None:
    check_values(self.config, _CHOICES, _NUMBERS)
    data = self.config.data
    known = LANGUAGES[data.source][: 2 if self._is_prepared else None]
    if not re.fullmatch("|".join(known) or "[a-z]{2,3}-[a-z]{2,3}", data.languages):
      raise InputError(
        f"config.data.languages is {data.languages!r}: give source-target, "
        f"as {', '.join(known) or 'en-de'}"
      )
    if self._is_prepared and not self.config.evaluation.subword_mark:
      raise InputError(
        "config.data.multi30k.prepared is text in subwords: set config.evaluation.subword_mark=@@"
      )
    tasks.check_batches(self.config, sizes)

  @property
  def _is_prepared(self) -> bool:
    """Returns whether the data are those of the published baseline, in tokens and subwords."""
    return self.config.data.source == "multi30k" and self.config.data.multi30k.prepared

  def load_data(self) -> Corpus:
    """Loads and normalises the sentence pairs of `config.data`."""
    bleu.check_tokenizer(self.config.evaluation.tokenize)  # before hours of training
    data = self.config.data
    options = data[data.source].to_dict()
    if len(LANGUAGES[data.source]) > 1:
      options["languages"] = data.languages
    corpus = _LOADERS[data.source](**options)
    if "valid" not in corpus.splits:
      raise InputError(
        "no validation pairs: give --config.data.pairs.valid=source_file,target_file"
      )
    corpus, mark = self.normalize(corpus), self.config.evaluation.subword_mark
    if mark and all(
      bleu.join_subwords(x, mark) == x for _, x in corpus.splits["train"]
    ):
      raise InputError(
        f"config.evaluation.subword_mark is {mark!r}, but no training target's subword ends in it: "
        "give the mark of the text, or none; config.data.moses would separate it from its subword"
      )
    return corpus

  def normalize(self, corpus: Corpus) -> Corpus:
    """Normalises pairs as in training: lists at once, other sequences item by item when read."""
    if not (self.config.data.moses or self.config.data.lowercase):
      return corpus

    def normalize(pair: tuple[str, str]) -> tuple[str, ...]:
      return tuple(
        self.normalize_lines([line], side)[0] for side, line in enumerate(pair)
      )

    splits = {
      split: list(map(normalize, x))
      if isinstance(x, list)
      else corpora.LazyPairs(x, normalize)
      for split, x in corpus.splits.items()
    }
    return corpus._replace(splits=splits)

  def normalize_lines(self, lines: Sequence[str], side: int = 0) -> list[str]:
    """Normalises lines of the source language, or with side 1 of the target's, as in training."""
    data = self.config.data
    language = data.languages.split("-")[side]
    return corpora.normalize_lines(
      lines, language, moses=data.moses, lowercase=data.lowercase
    )

  def join(self, lines: Sequence[str]) -> list[str]:
    """Joins subwords marked by `config.evaluation.subword_mark` into words."""
    return [
      bleu.join_subwords(line, self.config.evaluation.subword_mark) for line in lines
    ]

  def score_lines(
    self, translations: Sequence[str], references: Sequence[str]
  ) -> tuple[dict[str, bleu.Score], Int[np.ndarray, "sentences 7"]]:
    """Returns the scores named in `scores.TITLES` and the `sentence_statistics`, of whole words."""
    data, lowercase = self.config.data, self.config.evaluation.lowercase
    texts = self.join(translations), self.join(references)
    options = dict(tokenize=self.config.evaluation.tokenize, lowercase=lowercase)
    language, is_tokenized = (
      data.languages.partition("-")[2],
      data.moses or self._is_prepared,
    )
    counts = bleu.sentence_statistics(*texts, **options)
    found = dict(
      sacrebleu=bleu.corpus_bleu(*texts, **options),
      paper_bleu=bleu.paper_bleu(*texts, language, tokenized=is_tokenized),
      chrf=bleu.corpus_chrf(*texts, lowercase=lowercase),
      exact=bleu.Score(
        100 * float(counts[:, -1].mean()), f"case:{'lc' if lowercase else 'mixed'}"
      ),
    )
    return found, counts

  def name_split(self, split: str) -> str:
    """Adds the files of a test set to its name: others may be given, the same must not change."""
    name, data = super().name_split(split), self.config.data
    if split == "valid" or data.source != "pairs":
      return name
    files = data.pairs.test
    return f"{name} {files if isinstance(files, str) else files[split]}"

  def learn_vocabulary(self, data: Corpus, workdir: Path) -> Tokenizer:
    """Reads the tokenizer of the run directory, or trains it.

    Raises InputError: there is a checkpoint but not its tokenizer.
    """
    if (workdir / tok.FILE).exists() or any(workdir.glob("checkpoints/[0-9]*")):
      return tok.load_tokenizer(workdir)
    return self.learn_tokenizer(data)

  def learn_tokenizer(self, data: Corpus) -> Tokenizer:
    """Trains the vocabulary of `config.vocabulary` on both sides of the training split."""
    lines = (line for pair in data.splits["train"] for line in pair)
    return tok.train_tokenizer(lines, **self.config.vocabulary)

  def load_vocabulary(self, workdir: Path) -> Tokenizer:
    return tok.load_tokenizer(workdir)

  def save_vocabulary(self, vocabulary: Tokenizer, workdir: Path) -> None:
    if not (workdir / tok.FILE).exists():
      write_whole(workdir / tok.FILE, vocabulary.to_str())

  def mock_vocabulary(self) -> Any:
    return SimpleNamespace(get_vocab_size=lambda: self.config.vocabulary.size)

  def make_batches(
    self, data: Corpus, vocabulary: Tokenizer, mesh: AnyMesh
  ) -> tuple[Batches, Batches]:
    train, valid = (
      tok.encode_pairs(vocabulary, data.splits[name]) for name in ("train", "valid")
    )
    make = tasks.batch_maker(self.config, pair_lengths(*train), mesh)
    return make(*train, seed=self.config.seed), make(*valid, seed=None)

  def empty_batch(self, shape: tuple[int, ...]) -> Batch:
    return Batch(*2 * [np.zeros(shape, np.int32)])

  def make_model(self, vocabulary: Any, rngs: nnx.Rngs) -> Transformer:
    size = vocabulary.get_vocab_size()
    config = TransformerConfig(size, size, **tasks.model_values(self.config))
    return Transformer(config, rngs=rngs)

  def loss(
    self, model: Transformer, batch: Batch, rngs: nnx.Rngs | None = None
  ) -> Loss:
    """Computes the loss of each target token, given the source and the target before it."""
    logits = model(batch.source, tasks.shift_right(batch.target, tok.BOS), rngs=rngs)
    return tasks.cross_entropy(
      logits, batch.target, smoothing=self.config.training.label_smoothing
    )

  def make_report(self, run: Run, data: Corpus, batches: Any):
    """Returns a function that scores greedy translations and shows a few.

    Samples of valid are no longer than in training; those of a test set are longer, if
    it has any.
    """
    translate, training = make_translator(run, beam_size=1), self.config.training
    splits = ["valid", *(_tests(data) if training.score_tests else ())]
    samples = {}
    for split in splits:
      pairs = data.splits[split]
      lengths = pair_lengths(*tok.encode_pairs(run.vocabulary, pairs))
      chosen = (lengths <= self.config.batches.max_length) == (split == "valid")
      chosen |= ~chosen.any()
      samples[split] = [*itertools.compress(pairs, chosen)][: training.num_samples]

    def report(params: PyTree) -> tuple[dict[str, float], str]:
      values, shown = {}, []
      for split, pairs in samples.items():
        sources, references = zip(*pairs, strict=True)
        translations = translate(sources, params)
        found, _ = self.score_lines(translations, references)
        names = dict(bleu="sacrebleu", chrf="chrf", exact="exact")
        values |= {f"{split}_{name}": found[kind].value for name, kind in names.items()}
        rows = zip(sources, references, translations, strict=True)
        shown.append(scores.format_samples(map(self.join, itertools.islice(rows, 3))))
      return values, shown[0]

    return report

  def evaluate(self, run: Run, data: Corpus, workdir: Path) -> Evaluation | None:
    """Translates and scores the test splits; writes the translations into the run directory."""
    progress = (
      dict(track=functools.partial(track, what="sentences")) if is_first() else {}
    )
    is_given = (False, True) if self.config.evaluation.given_lengths else (False,)
    translated = {}
    for given in is_given:
      translate = make_translator(run, never_ends=given, **progress)
      for split in _tests(data):
        pairs, name = data.splits[split], split + scores.GIVEN * given
        if is_first():
          print(f"{name}: {len(pairs):,} sentences to translate", file=sys.stderr)
        sources, targets = zip(*pairs, strict=True)
        limits = tok.encode(run.vocabulary, targets).lengths - 1 if given else None
        start = time.perf_counter()
        translations = translate(sources, None, limits)
        seconds = round(time.perf_counter() - start, 1)
        skipped = data.skipped.get(split, ())
        translated[name] = scores.Translated(pairs, translations, seconds, skipped)
    return scores.evaluate(run, translated, workdir) if is_first() else None


def _tests(data: Corpus) -> list[str]:
  """Returns the names of the test sets, test first."""
  return sorted(data.splits.keys() - {"train", "valid"}, key=lambda x: (x != "test", x))


def make_translator(run: Run, **changes) -> Translator:
  """Makes a translator on the run's devices from `config.decoding` and changes to it."""
  size = run.vocabulary.get_vocab_size()
  options = dict(key=f"{run.config.model.to_json(sort_keys=True)} {size}")
  options |= run.config.decoding.to_dict() | changes
  del options["average_checkpoints"]
  return Translator(run.graphdef, run.params, run.vocabulary, run.mesh, **options)
