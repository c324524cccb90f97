"""A run's folder takes the same config's run again, and nothing else."""

import errno
import json
import pathlib

import pytest

from experiments import files
from experiments.config import flatten
from experiments.errors import InputError
from experiments.training import workdir as workdir_module
from experiments.training.workdir import (
  check_shared,
  check_workdir,
  read_json,
  write_run_files,
)

MODEL = dict(width=512, rate=0.1, layers=(1, 2), name="Käse")
CONFIG = dict(
  seed=0,
  model=MODEL | {"younger": 0},
  training=dict(num_steps=100, save_every=10, warmup_steps=4),
  batches=dict(tokens=8),
  decoding=dict(beam_size=4),
)
NO_LONGER = {"packed": False}  # a key that there was
OLD = CONFIG | dict(model=MODEL, batches=CONFIG["batches"] | NO_LONGER)
DEFAULTS = {"model.younger": 0, "seed": 5}


def changed(**sections):
  return CONFIG | {name: CONFIG[name] | values for name, values in sections.items()}


@pytest.mark.parametrize(
  "config",
  [
    CONFIG,
    changed(training=dict(num_steps=200, save_every=5)),
    changed(decoding=dict(beam_size=1, length_penalty=0.6)),
  ],
)
def test_a_run_goes_on_with_its_config_but_for_what_no_step_depends_on(
  tmp_path, config
):
  check_workdir(tmp_path / "new", flatten(config), DEFAULTS)
  assert not (tmp_path / "new").exists()
  write_run_files(tmp_path, OLD, updates=100)
  check_workdir(tmp_path, flatten(config), DEFAULTS)


@pytest.mark.parametrize(
  "config, words",
  [
    (changed(model=dict(width=128)), "model.width is 512 there and 128 here"),
    (changed(model=dict(bias=True)), "model.bias is absent there and true here"),
    (changed(model=dict(younger=1)), "model.younger is 0 there and 1 here"),
  ],
)
def test_another_config_is_refused_with_the_key_and_both_values(
  tmp_path, config, words
):
  write_run_files(tmp_path, OLD, updates=100)
  with pytest.raises(InputError, match=f"{tmp_path} .*{words}: give another --workdir"):
    check_workdir(tmp_path, flatten(config), DEFAULTS)


def test_a_run_by_code_that_computes_other_numbers_is_refused(tmp_path, monkeypatch):
  write_run_files(tmp_path, OLD, updates=100)
  environment = read_json(tmp_path / "environment.json")
  del environment["recipe"]  # as in an older run
  (tmp_path / "environment.json").write_text(json.dumps(environment))
  check_workdir(tmp_path, flatten(CONFIG), DEFAULTS)
  monkeypatch.setattr(workdir_module, "RECIPE", 3)
  with pytest.raises(InputError, match=f"{tmp_path} holds a run by other code"):
    check_workdir(tmp_path, flatten(CONFIG), DEFAULTS)


def test_the_environment_of_a_trained_run_stays(tmp_path, monkeypatch):
  write_run_files(tmp_path, CONFIG, updates=100)
  trained = read_json(tmp_path / "environment.json")
  monkeypatch.setattr(workdir_module, "environment", lambda: {"cpu": "another"})
  write_run_files(tmp_path, CONFIG, updates=100, is_trained=True)
  assert read_json(tmp_path / "environment.json") == trained
  write_run_files(tmp_path, CONFIG, updates=200)
  assert read_json(tmp_path / "environment.json")["cpu"] == "another"


def test_a_folder_with_other_files_is_refused(tmp_path):
  (tmp_path / "thesis.tex").write_text("years of work")
  with pytest.raises(InputError, match=r"holds 'thesis\.tex' but no run"):
    check_workdir(tmp_path, flatten(CONFIG), DEFAULTS)


def test_a_folder_without_what_the_first_process_wrote_is_not_shared(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(workdir_module, "_SHARED_SECONDS", 0)
  for folder in (tmp_path, tmp_path / "nowhere"):
    refusal = f"{folder} is not one folder for all processes"
    with pytest.raises(InputError, match=refusal):
      check_shared(folder)
  write_run_files(tmp_path, CONFIG, updates=100)
  check_shared(tmp_path)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  write_run_files(tmp_path, CONFIG, updates=100)

  def full_disk(path, mode):
    pathlib.Path(path).write_text("{")
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as context, pytest.raises(OSError, match="No space"):
    context.setattr(files, "open", full_disk, raising=False)
    write_run_files(tmp_path, changed(training=dict(num_steps=200)), updates=200)
  assert read_json(tmp_path / "config.json")["training"]["num_steps"] == 100
