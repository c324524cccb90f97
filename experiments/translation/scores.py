"""Evaluates translations: scores, statistics of sentences, samples, attention maps."""

import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from experiments.data.batching import pair_lengths
from experiments.data.tokenizer import BOS, encode, encode_pairs, pieces
from experiments.evaluation import bleu
from experiments.evaluation.pictures import Panel, attention_heatmap
from experiments.evaluation.tables import text_table
from experiments.files import Path, write_lines
from experiments.training.loop import ScoreFunction
from experiments.training.metrics import track
from experiments.training.processes import is_first, print_once
from experiments.training.results import Evaluation
from experiments.training.run import Run, copy_to_process
from experiments.translation.corpus import Corpus
from experiments.translation.data import is_prepared, list_tests
from experiments.translation.translator import make_translator
from relpos_jax.typing import Array, Int, PyTree

_NUM_SAMPLES = 5
GIVEN = "_given"  # ends a test set's name if its references' lengths are given

# The name of each score in tables, by its name in records.
TITLES = dict(
  sacrebleu="sacreBLEU", paper_bleu="paper's BLEU", chrf="chrF", exact="exact (%)"
)

Pairs = Sequence[tuple[str, str]]


class Translated(NamedTuple):
  """Holds a split's pairs, their translations, and the seconds that translating took.

  `pairs` leaves out pairs with an empty side; `skipped` has their indices in the files.
  """

  pairs: Pairs
  translations: Sequence[str]
  seconds: float
  skipped: Sequence[int] = ()


def make_score(run: Run, data: Corpus) -> ScoreFunction:
  """Makes a function that scores a model's greedy translations, given its parameters.

  It translates the first pairs of the validation split that are no longer than
  `batches.max_length`. With `training.score_tests` it also translates the first pairs
  of each test set, the longer ones if there are any. It returns scores by name, and a
  text with three translations.
  """
  settings, mark = run.config.training, run.config.evaluation.subword_mark
  translate = make_translator(run, beam_size=1)
  tests = list_tests(data) if settings.score_tests else []
  samples = {}
  for split in ("valid", *tests):
    lengths = pair_lengths(*encode_pairs(run.vocabulary, data.splits[split]))
    is_short = lengths <= run.config.batches.max_length
    is_chosen = is_short == (split == "valid")
    if not is_chosen.any():
      is_chosen = ~is_chosen
    pairs = itertools.compress(data.splits[split], is_chosen)
    samples[split] = list(itertools.islice(pairs, settings.num_samples))

  def score(params: PyTree):
    values, text = {}, ""
    for split, pairs in samples.items():
      sources, references = zip(*pairs, strict=True)
      translations = translate(sources, params)
      named_scores, _ = score_lines(run.config, translations, references)
      values[f"{split}_bleu"] = named_scores["sacrebleu"].value
      values[f"{split}_chrf"] = named_scores["chrf"].value
      values[f"{split}_exact"] = named_scores["exact"].value
      text = text or format_samples(pairs[:3], translations, mark)
    return values, text

  return score


def translate_tests(run: Run, data: Corpus) -> dict[str, Translated]:
  """Translates the test sets; returns the results by name.

  If `config.evaluation.given_lengths` is set, translates each test set a second time.
  Each translation then gets exactly as many tokens as its reference. The name of this
  result ends in "_given".
  """
  progress = functools.partial(track, what="sentences")
  translated = {}
  kinds = [False]
  if run.config.evaluation.given_lengths:
    kinds.append(True)
  for is_given in kinds:
    translate = make_translator(run, never_ends=is_given, track=progress)
    for split in list_tests(data):
      pairs = data.splits[split]
      name = split + GIVEN if is_given else split
      print_once(f"{name}: {len(pairs):,} sentences to translate")
      sources, targets = zip(*pairs, strict=True)
      limits = None
      if is_given:
        limits = encode(run.vocabulary, map(str.strip, targets)).lengths - 1
      start = time.perf_counter()
      translations = translate(sources, None, limits)
      seconds = round(time.perf_counter() - start, 1)
      skipped = data.skipped.get(split, ())
      translated[name] = Translated(pairs, translations, seconds, skipped)
  return translated


def score_lines(
  config: ConfigDict, translations: Sequence[str], references: Sequence[str]
) -> tuple[dict[str, bleu.Score], Int[np.ndarray, "sentences 7"]]:
  """Scores translations; returns the scores by name, and statistics of each sentence.

  The names are the keys of `TITLES`. The statistics are rows of
  `bleu.sentence_statistics`. Before scoring, subwords are joined into words.
  """
  lowercase, mark = config.evaluation.lowercase, config.evaluation.subword_mark
  texts = join(translations, mark), join(references, mark)
  _, _, language = config.data.languages.partition("-")
  is_tokenized = config.data.moses or is_prepared(config)
  options = dict(tokenize=config.evaluation.tokenize, lowercase=lowercase)
  counts = bleu.sentence_statistics(*texts, **options)
  percent_exact = 100 * float(counts[:, -1].mean())
  case = "lc" if lowercase else "mixed"
  scores = {}
  scores["sacrebleu"] = bleu.corpus_bleu(*texts, **options)
  scores["paper_bleu"] = bleu.paper_bleu(*texts, language, tokenized=is_tokenized)
  scores["chrf"] = bleu.corpus_chrf(*texts, lowercase=lowercase)
  scores["exact"] = bleu.Score(percent_exact, f"case:{case}")
  return scores, counts


def join(lines: Iterable[str], mark: str) -> list[str]:
  """Joins the subwords of lines into words; see `bleu.join_subwords`."""
  return [bleu.join_subwords(line, mark) for line in lines]


def evaluate(
  run: Run, splits: Mapping[str, Translated], workdir: Path
) -> Evaluation | None:
  """Scores and writes the translations of each split, and draws attention for one.

  The file of translations has a line for each pair in the split's files; the line is
  empty if the pair was skipped. The evaluation's `sentences` have a row for each pair:
  the length of its longer side, in tokens without EOS, and its `sentence_statistics`.
  Samples and the picture are of the first split.

  Only the first process returns an evaluation; the others return None.
  """
  if not is_first():
    return None
  if not splits:
    command = f"python -m experiments.evaluate --workdir={workdir}"
    pairs = "--pairs=source_file,target_file or --pairs=file.tsv"
    text = f"no test pairs to score: score some with {command} {pairs}"
    return Evaluation(text, {}, {}, {})
  mark = run.config.evaluation.subword_mark
  rows, results, scores, sentences = {}, {}, {}, {}
  for split, translated in splits.items():
    pairs, translations = translated.pairs, translated.translations
    lines = join(translations, mark)
    for index in translated.skipped:  # in increasing order
      lines.insert(index, "")
    write_lines(workdir / f"{split}.translations.txt", lines)
    references = [target for _, target in pairs]
    named_scores, counts = score_lines(run.config, translations, references)
    rows[split] = {"sentences": len(pairs)} | named_scores
    results[split] = {"sentences": len(pairs), "seconds": translated.seconds}
    scores[split], signatures = {}, {}
    for name, score in named_scores.items():
      results[split][name] = score._asdict()
      scores[split][name] = score.value
      signatures[name] = score.signature
    scores[split]["signatures"] = signatures
    lengths = pair_lengths(*encode_pairs(run.vocabulary, pairs)) - 1
    sentences[split] = np.column_stack([lengths, counts]).tolist()
  first = next(iter(splits.values()))
  pairs = list(itertools.islice(first.pairs, _NUM_SAMPLES))
  samples = format_samples(pairs, first.translations, mark)
  by_length = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]))
  middle = by_length[len(pairs) // 2]
  source, translation = pairs[middle][0], first.translations[middle]
  picture = draw_attention(run, source, translation, workdir / "attention.png")
  text = f"{score_table(rows)}\n\n{samples}"
  return Evaluation(text, results, scores, sentences, (picture,))


def score_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """Formats the scores, with a line for each split, and then their signatures.

  >>> from experiments.evaluation.bleu import Score
  >>> scores = {name: Score(36.62, f"case:{name}") for name in TITLES}
  >>> print(score_table(dict(test=dict(sentences=1000) | scores)))
  split   sentences   sacreBLEU   paper's BLEU    chrF   exact (%)
  test        1,000       36.62          36.62   36.62       36.62
  <BLANKLINE>
  sacreBLEU: case:sacrebleu
  paper's BLEU: case:paper_bleu
  chrF: case:chrf
  exact (%): case:exact
  """
  table, signatures = {}, {}  # each signature once, in order
  for split, row in rows.items():
    table[split] = {"sentences": row["sentences"]}
    for name, title in TITLES.items():
      score = row[name]
      table[split][title] = score.value
      signatures[f"{title}: {score.signature}"] = None
  return "\n".join([text_table("split", table), "", *signatures])


def format_samples(pairs: Pairs, translations: Sequence[str], mark: str) -> str:
  """Formats pairs and their translations to be read.

  A sample has three lines, which begin with "source", "reference" and "translation".
  Subwords are joined into words: inside a word, they end in `mark`.
  """
  blocks = []
  for pair, translation in zip(pairs, translations, strict=False):
    lines = join([*pair, translation], mark)
    blocks.append("source       {}\nreference    {}\ntranslation  {}".format(*lines))
  return "\n\n".join(blocks)


def draw_attention(run: Run, source: str, translation: str, path: Path):
  """Draws the attention weights for a source and its translation; returns the path.

  The picture has two panels, both averaged over heads. The first shows self-attention
  in the encoder's first layer. The second shows attention from the translation to the
  source, averaged over the decoder's layers. Its rows are named after the tokens that
  the decoder writes next.
  """
  source_ids, target_ids = encode(run.vocabulary, [source.strip(), translation])
  target_input = np.concatenate([[BOS], target_ids[:-1]])
  params = copy_to_process(run.params)
  weights = _compute_weights(run.graphdef, params, source_ids[None], target_input[None])
  encoder, cross = map(np.asarray, weights)
  source_words = pieces(run.vocabulary, source_ids)
  target_words = pieces(run.vocabulary, target_ids)
  title = "self-attention, encoder layer 1"
  own = Panel(title, encoder, source_words, source_words)
  to_source = Panel("translation to source", cross, target_words, source_words)
  return attention_heatmap([own, to_source], path)


@functools.partial(jax.jit, static_argnums=0)
def _compute_weights(
  graphdef: nnx.GraphDef, params: PyTree, source: Array, target: Array
):
  """Computes the attention weights that `draw_attention` shows.

  Returns [S, S] for the encoder and [T, S] for the decoder, from the token ids of the
  source [1, S] and of the decoder's input [1, T].
  """
  model = nnx.merge(graphdef, params)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model, nnx.Intermediate)(source, target)

  def mean_over_heads(attention):
    return jnp.mean(attention["weights"][0][0], axis=0)

  layers = sown["decoder"]["layers"].values()
  cross = [mean_over_heads(layer["cross_attention"]) for layer in layers]
  encoder = mean_over_heads(sown["encoder"]["layers"][0]["self_attention"])
  return encoder, jnp.mean(jnp.stack(cross), axis=0)
