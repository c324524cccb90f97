"""Exported translators against this project's own translations; needs the extra export."""

import jax
import numpy as np
import pytest

from configs import multi30k
from experiments import export
from experiments.data.tokenizer import decode, encode, train_tokenizer
from experiments.systems import parse_config
from experiments.training.run import Run
from experiments.training.sharding import make_mesh
from experiments.translation.train import build
from experiments.translation.translator import make_translator

WORDS = [f"w{number}" for number in range(40)]


@pytest.mark.parametrize(
  "before, after, words",
  [
    (
      '"tables_per_head": false',
      '"tables_per_head": true',
      "config.model.tables_per_head is True --config.model.tables_per_head=False",
    ),
    (
      '"positions_in": "all"',
      '"positions_in": "encoder"',
      "config.model.positions_in 'encoder' --config.model.positions_in=all",
    ),
  ],
)
def test_what_cannot_be_exported_is_refused(
  call, workdir, tmp_path, before, after, words
):
  config = (workdir / "config.json").read_text()
  assert before in config
  run, out = tmp_path / "run", f"--out={tmp_path}/out"
  run.mkdir()
  (run / "config.json").write_text(config.replace(before, after))
  call("export", f"--workdir={run}", out).assert_refused(words)
  call("export", f"--workdir={workdir}", "--out=.").assert_refused(
    ". exists already --out"
  )
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("norm, tables_per_layer", [("pre", True), ("post", False)])
def test_ctranslate2_translates_as_the_model_that_was_exported(
  norm, tables_per_layer, tmp_path
):
  ctranslate2 = pytest.importorskip("ctranslate2")
  config = multi30k.get_config("published")
  config.model.update(num_layers=2, width=32, num_heads=4, max_distance=3, norm=norm)
  config.model.update(tables_per_head=False, tables_per_layer=tables_per_layer)
  tokenizer = train_tokenizer([" ".join(WORDS)], "words", 60)
  mesh = make_mesh()
  steps = build(parse_config(config), tokenizer, mesh)
  params = steps.init().params
  params = jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, params)  # tables count
  run = Run(config, tokenizer, mesh, steps.graphdef, params)
  export.ctranslate2_spec(run).save(str(tmp_path))

  lengths = np.random.default_rng(0).integers(1, 12, 20)
  lines = [
    " ".join(np.random.default_rng(i).choice(WORDS, n)) for i, n in enumerate(lengths)
  ]
  entries = {number: token for token, number in tokenizer.get_vocab().items()}
  sources = [[entries[i] for i in row.tolist()] for row in encode(tokenizer, lines)]
  translator = ctranslate2.Translator(str(tmp_path))
  ours = make_translator(run, beam_size=1, extra_length=0)(lines)
  for source, expected in zip(sources, ours, strict=True):
    (found,) = translator.translate_batch(
      [source],
      beam_size=1,
      max_decoding_length=len(source),
      min_decoding_length=0,
      suppress_sequences=[["<pad>"]],
    )
    ids = np.array([tokenizer.token_to_id(token) for token in found.hypotheses[0]], int)
    assert decode(tokenizer, ids) == expected
  assert len({*ours}) > 3
