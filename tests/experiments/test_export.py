"""Exported translators translate as this project does; needs the extra export."""

import json

import jax
import numpy as np
import pytest
from run_files import read_json

from configs import multi30k
from experiments import export
from experiments.data.tokenizer import train_tokenizer
from experiments.systems import parse_config
from experiments.training.run import Run
from experiments.training.sharding import make_mesh
from experiments.translation.train import build
from experiments.translation.translator import make_translator

WORDS = [f"w{number}" for number in range(40)]


def test_a_model_that_cannot_be_exported_is_refused(call, workdir, tmp_path):
  config = read_json(workdir / "config.json")
  config["model"]["tables_per_head"] = True
  (tmp_path / "config.json").write_text(json.dumps(config))
  answer = call("export", f"--workdir={tmp_path}", f"--out={tmp_path}/out")
  answer.assert_refused("config.model.tables_per_head is True --config.model. =False")
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

  generator = np.random.default_rng(0)
  lengths = generator.integers(1, 12, 20)
  lines = [" ".join(generator.choice(WORDS, length)) for length in lengths]
  ours = make_translator(run, beam_size=1, extra_length=0)(lines)
  translator = ctranslate2.Translator(str(tmp_path))
  for line, expected in zip(lines, ours, strict=True):
    tokens = [*line.split(), "</s>"]
    options = dict(beam_size=1, max_decoding_length=len(tokens), min_decoding_length=0)
    options["suppress_sequences"] = [["<pad>"]]
    (found,) = translator.translate_batch([tokens], **options)
    words = [word for word in found.hypotheses[0] if word not in ("<s>", "</s>")]
    assert " ".join(words) == expected
  assert len({*ours}) > 3
