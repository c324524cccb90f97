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
  rows, results, scores, sentences = {}, {}, {}, {}
  for split, (pairs, translations, seconds, skipped) in splits.items():
    lines = run.task.join(translations)
    for index in skipped:  # in increasing order
      lines.insert(index, "")
    text = "".join(f"{line}\n" for line in lines)
    write_whole(workdir / f"{split}.translations.txt", text)
    found, counts = run.task.score_lines(translations, [target for _, target in pairs])
    rows[split] = dict(sentences=len(pairs)) | found
    results[split] = dict(sentences=len(pairs), seconds=seconds)
    results[split] |= {name: score._asdict() for name, score in found.items()}
    scores[split] = {name: score.value for name, score in found.items()}
    scores[split]["signatures"] = {
      name: score.signature for name, score in found.items()
    }
    lengths = pair_lengths(*encode_pairs(run.vocabulary, pairs)) - 1
    sentences[split] = np.column_stack([lengths, counts]).tolist()
  first = next(iter(splits.values()))
  examples = [*zip(first.pairs, first.translations, strict=True)][:_NUM_SAMPLES]
  samples = format_samples([run.task.join([*pair, line]) for pair, line in examples])
  (source, _), translation = sorted(examples, key=lambda x: len(x[0][0]))[
    len(examples) // 2
  ]
  picture = draw_attention(run, source, translation, workdir / "attention.png")
  text = f"\n\n{score_table(rows)}\n\n{samples}\n\n"
  return Evaluation(text, results, scores, sentences, (picture,))


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
  header = [
    f"{'split':{width}}",
    "sentences",
    *(f"{title:>5}" for title in TITLES.values()),
  ]
  lines, signatures = ["   ".join(header)], []
  for split, row in rows.items():
    cells = [f"{split:{width}}", f"{row['sentences']:9,}"]
    for name, title in TITLES.items():
      cells.append(f"{row[name].value:{max(5, len(title))}.2f}")
      signatures.append(f"{title}: {row[name].signature}")
    lines.append("   ".join(cells))
  return "\n".join([*lines, "", *dict.fromkeys(signatures)])


def format_samples(samples: Iterable[Sequence[str]]) -> str:
  """Formats a source, its reference and its translation one below the other, for each sample."""
  block = "source       {}\nreference    {}\ntranslation  {}"
  return "\n\n".join(block.format(*sample) for sample in samples)


def draw_attention(run: Run, source: str, translation: str, path: Path):
  """Draws the attention of the encoder's first layer, and that from a translation to
  its source.

  Weights are means over heads; those of the second panel are also means over layers.
  Each row of the second panel is the token that the decoder is about to write. Returns
  the path.
  """
  source_ids, target_ids = encode(run.vocabulary, [source.strip(), translation])
  target_input = np.concatenate([[BOS], target_ids[:-1]])
  params = own_copies(run.params)
  encoder, cross = _weights(run.graphdef, params, source_ids[None], target_input[None])
  source_words = pieces(run.vocabulary, source_ids)
  target_words = pieces(run.vocabulary, target_ids)
  panels = [
    Panel(
      "self-attention, encoder layer 1", np.asarray(encoder), source_words, source_words
    ),
    Panel("translation to source", np.asarray(cross), target_words, source_words),
  ]
  return attention_heatmap(panels, path)


@functools.partial(jax.jit, static_argnums=0)
def _weights(graphdef: nnx.GraphDef, params: PyTree, source: Array, target: Array):
  """Returns the weights of both panels, (S, S) and (T, S), for ids (1, S) and (1, T)."""
  model = nnx.merge(graphdef, params)
  model.set_attributes(sow_weights=True, raise_if_not_found=False)
  _, sown = nnx.capture(model, nnx.Intermediate)(source, target)

  def mean_over_heads(attention):
    return jnp.mean(attention["weights"][0][0], axis=0)

  cross = [
    mean_over_heads(x["cross_attention"]) for x in sown["decoder"]["layers"].values()
  ]
  encoder = mean_over_heads(sown["encoder"]["layers"][0]["self_attention"])
  return encoder, jnp.mean(jnp.stack(cross), axis=0)
