"""A run's folder takes the same config's run again, and nothing else."""

import errno
import importlib.metadata
import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from experiments import files
from experiments.errors import InputError
from experiments.training import environment as environment_module
from experiments.training import workdir as workdir_module
from experiments.training.workdir import check_shared, claim_workdir, write_run_files

CONFIG = dict(
  seed=0,
  model=dict(width=512, rate=0.1, layers=(1, 2), name="Käse"),
  training=dict(num_steps=100, save_every=10, warmup_steps=4),
  decoding=dict(beam_size=4),
)


def changed(**sections):
  return CONFIG | {name: CONFIG[name] | values for name, values in sections.items()}


def contents(folder):
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(folder, config):
  before = contents(folder)
  with pytest.raises(InputError) as error:
    claim_workdir(folder, config)
  assert contents(folder) == before
  assert "\n" not in str(error.value) and str(folder) in str(error.value)
  return str(error.value)


def test_a_new_folder_is_made_with_the_first_files_of_a_run(tmp_path):
  folder = tmp_path / "runs" / "a"
  assert claim_workdir(folder, CONFIG) is False
  assert not (tmp_path / "runs").exists()
  write_run_files(folder, CONFIG)
  (folder / "metrics.jsonl").touch()
  assert claim_workdir(folder, CONFIG) is True


def test_a_key_younger_than_the_run_had_its_default(tmp_path):
  write_run_files(tmp_path, CONFIG)
  for value, taken in (0, True), (1, False):
    config = changed(model=dict(younger=value))
    if taken:
      assert claim_workdir(tmp_path, config, dict(seed=5, model=dict(width=1, younger=0)))
    else:
      with pytest.raises(InputError, match=r"model\.younger is 0 there and 1 here"):
        claim_workdir(tmp_path, config, dict(model=dict(younger=0)))
  assert "model.younger is absent there" in refusal(tmp_path, changed(model=dict(younger=0)))


@pytest.mark.parametrize(
  "config, words",
  [
    (changed(model=dict(width=128)), "model.width 512 128"),
    (changed(model=dict(layers=(1, 3))), "model.layers [1, 2] [1, 3]"),
    (changed(model=dict(bias=True)), "model.bias absent true"),
    (CONFIG | dict(model=dict(width=512)), "model.rate 0.1 absent"),
    (CONFIG | dict(decoding_of=3), "decoding_of absent 3"),
  ],
)
def test_another_config_is_refused_with_the_key_and_both_values(tmp_path, config, words):
  write_run_files(tmp_path, CONFIG)
  text = refusal(tmp_path, config)
  assert "another --workdir" in text
  assert all(word in text for word in words.split())


def test_what_no_step_depends_on_may_change(tmp_path):
  write_run_files(tmp_path, CONFIG)
  training, decoding = dict(num_steps=200, save_every=5), dict(beam_size=1, length_penalty=0.6)
  assert claim_workdir(tmp_path, changed(training=training, decoding=decoding)) is True


def test_run_files_hold_the_config_and_what_it_runs_on(tmp_path):
  write_run_files(tmp_path, CONFIG)
  assert json.loads((tmp_path / "config.json").read_text("utf-8")) == json.loads(json.dumps(CONFIG))
  environment = json.loads((tmp_path / "environment.json").read_text("utf-8"))
  assert environment["devices"] == "8 x cpu" and environment["cpu_cores"] >= 1
  assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
  assert environment["packages"]["jax"] == importlib.metadata.version("jax")
  assert shlex.split(environment["command"])[1:] == sys.orig_argv[1:]
  assert environment["cpu"] and environment["date"].endswith("+00:00")


def test_a_result_that_is_written_leaves_the_commit_clean_and_code_does_not(tmp_path, monkeypatch):
  git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True)
  code, result = tmp_path / "experiments/training/environment.py", tmp_path / "results/a.json"
  for file in (code, result):
    file.parent.mkdir(parents=True)
    file.write_text("1")
  git("init", "--quiet")
  git("add", ".")
  git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message=a")
  monkeypatch.setattr(environment_module, "__file__", str(code))
  found = []
  for file in (result, code):
    file.write_text("2")
    found.append(environment_module.environment()["git_commit"])
  assert len(found[0]) == 40 and found[1] == found[0] + "-dirty"


@pytest.mark.parametrize("started", [False, True])
def test_a_start_that_fails_while_writing_leaves_the_run_as_it_was(tmp_path, monkeypatch, started):
  if started:
    write_run_files(tmp_path, CONFIG)

  def full_disk(path, mode):
    pathlib.Path(path).write_text("{")
    raise OSError(errno.ENOSPC, "No space left on device")

  with monkeypatch.context() as context, pytest.raises(OSError, match="No space"):
    context.setattr(files, "open", full_disk, raising=False)
    write_run_files(tmp_path, changed(training=dict(num_steps=200)))
  assert claim_workdir(tmp_path, CONFIG) is started


def test_a_folder_without_what_the_first_process_wrote_is_not_shared(tmp_path, monkeypatch):
  monkeypatch.setattr(workdir_module, "_SHARED_SECONDS", 0)
  for folder in (tmp_path, tmp_path / "nowhere"):
    with pytest.raises(InputError, match=f"{folder} is not one folder for all processes"):
      check_shared(folder)
  write_run_files(tmp_path, CONFIG)
  check_shared(tmp_path)


def test_copies_of_a_killed_process_are_deleted_and_those_of_another_are_kept(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
  code = "from experiments.files import local_folder\nwith local_folder() as folder: "
  code += "(folder / 'copy').touch(), print(flush=True), __import__('time').sleep(60)"
  with subprocess.Popen(
    [sys.executable, "-c", code], env=dict(os.environ, TMPDIR=str(tmp_path)), stdout=subprocess.PIPE
  ) as other:
    other.stdout.readline()
    (theirs,) = tmp_path.iterdir()
    with files.local_folder() as ours:
      assert {*tmp_path.iterdir()} == {ours, theirs}
    other.kill()
  assert (theirs / "copy").exists()
  with files.local_folder() as ours:
    assert [*tmp_path.iterdir()] == [ours]
  assert not [*tmp_path.iterdir()]
