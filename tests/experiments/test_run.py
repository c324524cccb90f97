"""From a config and a corpus to the parts of a run."""

import json

import numpy as np
import pytest

from configs import quickstart
from experiments import run as run_module
from relpos_jax.training.sharding import make_mesh
from relpos_jax.translation.corpus import Corpus
from relpos_jax.translation.task import Translation

PAIRS = [("a dog runs", "ein Hund rennt"), ("it rains", "es regnet"), ("no", "nein")] * 4


@pytest.mark.parametrize("space", ["\t", "\u3000 "])
def test_training_sees_lines_as_translating_does_without_the_space_around_them(space):
  spaced = [(f"{source}{space}", f"{space}{target}{space}") for source, target in PAIRS]
  config = quickstart.get_config()
  plain = Corpus(dict(train=PAIRS, valid=PAIRS))
  task, mesh = Translation(config), make_mesh(data=1)
  tokenizers = task.learn_tokenizers(plain)
  wanted = task.make_batches(plain, tokenizers, mesh)
  found = task.make_batches(Corpus(dict(train=spaced, valid=spaced)), tokenizers, mesh)
  for ours, theirs in zip(found, wanted, strict=True):
    assert ours.num_per_epoch == theirs.num_per_epoch
    for step in range(ours.num_per_epoch):
      np.testing.assert_array_equal(ours[step], theirs[step])


def test_a_run_from_before_a_key_was_there_has_its_default_and_none_that_is_gone(tmp_path):
  config = quickstart.get_config()
  values = json.loads(json.dumps(config.to_dict()))
  del values["evaluation"]["subword_mark"], values["data"]["multi30k"]
  values["data"]["embedded"]["seed"] = 0
  (tmp_path / "config.json").write_text(json.dumps(values))
  assert run_module.read_config(tmp_path).to_dict() == config.to_dict()
