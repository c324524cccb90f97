"""Evaluation of translations: scores, counts by sentence, samples and attention maps."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data.batching import pair_lengths
from experiments.data.tokenizer import BOS, encode, encode_pairs, pieces
from experiments.evaluation.pictures import Panel, attention_heatmap
from experiments.files import Path, write_whole
from experiments.training.task import Evaluation, Run, own_copies
from relpos_jax.typing import Array, PyTree

_NUM_SAMPLES = 5
GIVEN = "_given"  # ends the names of test sets that are translated with lengths given

# The names of scores in records, and in tables.
TITLES = dict(
  sacrebleu="sacreBLEU", paper_bleu="paper's BLEU", chrf="chrF", exact="exact (%)"
)

Pairs = Sequence[tuple[str, str]]


class Translated(NamedTuple):
  """A split's pairs, their translations, and the seconds that these took.

  `skipped` are the indices, in the split's files, of the pairs that are not among them.
  """

  pairs: Pairs
  translations: Sequence[str]
  seconds: float
  skipped: Sequence[int] = ()


def evaluate(run: Run, splits: Mapping[str, Translated], workdir: Path) -> Evaluation:
  """Scores the translations of each split, writes them, and draws the attention of one.

  The file of translations has a line for each pair of the split's files, empty if it
  was skipped. A row of `sentences` is a sentence's length in tokens without EOS, that
  of the longer side, and its `sentence_statistics`. Samples and the picture are of the
  first split.
  """
  if not splits:
    command = f"python -m experiments.evaluate --workdir={workdir}"
    pairs = "--pairs=source_file,target_file or --pairs=file.tsv"
    return Evaluation(
      f"no test pairs to score: score some with {command} {pairs}", {}, {}, {}
    )
  rows, results, values, sentences = {}, {}, {}, {}
  for split, translated in splits.items():
    _write_translations(run, translated, workdir / f"{split}.translations.txt")
    references = [target for _, target in translated.pairs]
    scores, counts = run.task.score_lines(translated.translations, references)
    rows[split] = {"sentences": len(references)} | scores
    results[split] = {"sentences": len(references), "seconds": translated.seconds}
    values[split], signatures = {}, {}
    for name, score in scores.items():
      results[split][name] = score._asdict()
      values[split][name] = score.value
      signatures[name] = score.signature
    values[split]["signatures"] = signatures
    lengths = pair_lengths(*encode_pairs(run.vocabulary, translated.pairs)) - 1
    sentences[split] = np.column_stack([lengths, counts]).tolist()
  first = next(iter(splits.values()))
  examples = []
  for (source, target), translation in zip(
    first.pairs[:_NUM_SAMPLES], first.translations[:_NUM_SAMPLES], strict=True
  ):
    examples.append((source, target, translation))
  samples = format_samples(map(run.task.join, examples))
  text = f"\n\n{score_table(rows)}\n\n{samples}\n\n"
  examples.sort(key=lambda example: len(example[0]))
  source, _, translation = examples[len(examples) // 2]
  picture = draw_attention(run, source, translation, workdir / "attention.png")
  return Evaluation(text, results, values, sentences, (picture,))


def _write_translations(run: Run, translated: Translated, path: Path) -> None:
  lines = run.task.join(translated.translations)
  for index in translated.skipped:  # in increasing order
    lines.insert(index, "")
  write_whole(path, "".join(f"{line}\n" for line in lines))


def score_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """Formats the scores, one row per split, followed by their signatures.

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
  width = max(map(len, ("split", *rows)))
  titles = [f"{title:>5}" for title in TITLES.values()]
  lines = ["   ".join([f"{'split':{width}}", "sentences", *titles])]
  signatures = {}  # each once, in order
  for split, row in rows.items():
    cells = [f"{split:{width}}", f"{row['sentences']:9,}"]
    for name, title in TITLES.items():
      score = row[name]
      cells.append(f"{score.value:{max(5, len(title))}.2f}")
      signatures[f"{title}: {score.signature}"] = None
    lines.append("   ".join(cells))
  return "\n".join([*lines, "", *signatures])


def format_samples(samples: Iterable[Sequence[str]]) -> str:
  """Formats each sample: a source, its reference and its translation, one a line."""
  block = "source       {}\nreference    {}\ntranslation  {}"
  return "\n\n".join(block.format(*sample) for sample in samples)


def draw_attention(run: Run, source: str, translation: str, path: Path):
  """Draws the attention within a source, and from a translation to it.

  The first panel shows the encoder's first layer, the second the mean of the decoder's
  layers; both are means over heads. Each row of the second panel is the token that the
  decoder is about to write. Returns the path.
  """
  source_ids, target_ids = encode(run.vocabulary, [source.strip(), translation])
  target_input = np.concatenate([[BOS], target_ids[:-1]])
  params = own_copies(run.params)
  encoder, cross = _weights(run.graphdef, params, source_ids[None], target_input[None])
  source_words = pieces(run.vocabulary, source_ids)
  target_words = pieces(run.vocabulary, target_ids)
  title = "self-attention, encoder layer 1"
  own = Panel(title, np.asarray(encoder), source_words, source_words)
  title = "translation to source"
  to_source = Panel(title, np.asarray(cross), target_words, source_words)
  return attention_heatmap([own, to_source], path)


@functools.partial(jax.jit, static_argnums=0)
def _weights(graphdef: nnx.GraphDef, params: PyTree, source: Array, target: Array):
  """Returns the weights of both panels, (S, S) and (T, S), for ids (1, S) and (1, T)."""
  model = nnx.merge(graphdef, params)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model, nnx.Intermediate)(source, target)

  def mean_over_heads(attention):
    return jnp.mean(attention["weights"][0][0], axis=0)

  layers = sown["decoder"]["layers"].values()
  cross = [mean_over_heads(layer["cross_attention"]) for layer in layers]
  encoder = mean_over_heads(sown["encoder"]["layers"][0]["self_attention"])
  return encoder, jnp.mean(jnp.stack(cross), axis=0)
