"""Training, scoring and sampling of music by the commands."""

import pathlib
import shutil

import numpy as np
import pytest
from run_files import read_json

from experiments.music import train as train_module
from experiments.music import voices
from experiments.music.scores import likelihood, make_nats_function
from experiments.music.sound import write_wav
from experiments.music.train import load_data, load_run
from experiments.systems import load_config
from experiments.training.run import copy_to_process

pytestmark = pytest.mark.usefixtures("in_the_repository")

SMALL = """
model.num_layers=1 model.width=16 model.num_heads=2 model.feed_forward=16
model.max_distance=8 batches.tokens=256 batches.max_length=64 batches.num_shapes=1
training.num_steps=6 training.eval_every=6 training.save_every=3 mesh.data=1
data.source=midi data.midi.codec=voices
"""
NUM_STEPS = 24  # of each piece: longer than a row


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> pathlib.Path:
  """Writes a folder of MIDI files: random walks of four voices."""
  folder = tmp_path_factory.mktemp("pieces")
  random = np.random.default_rng(0)
  for split, number in {"train": 6, "valid": 2, "test": 2}.items():
    (folder / split).mkdir()
    for piece in range(number):
      steps = np.cumsum(random.integers(-1, 2, (NUM_STEPS, 4)), axis=0)
      grid = np.array([72, 67, 60, 48]) + steps % 5
      voices.CODEC.write(voices.encode(grid), folder / split / f"{piece}.mid")
  return folder


@pytest.fixture(scope="module")
def train_music(trainer, pieces):
  """Runs train on the folder: train_music(workdir, "--config.seed=1")."""
  return trainer("configs/music.py", *SMALL.split(), f"data.midi.path={pieces}")


@pytest.fixture(scope="module")
def run(train_music, finish):
  """Returns a finished run's folder, read-only, and the command's answer."""
  return finish(train_music)


def test_a_run_is_scored_by_the_likelihood_of_complete_pieces(run, pieces):
  workdir, answer = run
  loaded = load_run(load_config(workdir), workdir)
  pieces = load_data(loaded.config).splits
  nats_of = make_nats_function(loaded.graphdef, copy_to_process(loaded.params))
  results = read_json(workdir / "results.json")
  for split in ("valid", "test"):
    wanted, _ = likelihood(nats_of, pieces[split], voices.times, token_budget=128)
    assert results[split]["nll"] == pytest.approx(wanted["nll"], rel=1e-5)
    assert f"{results[split]['nll']:.4g}" in answer.out
  for name in ("piano_roll.png", "learning_curves.png"):
    assert (workdir / name).stat().st_size > 5_000
    assert name in answer.out


def test_skipped_files_are_listed_in_the_run_directory(
  train_music, pieces, tmp_path, monkeypatch
):
  monkeypatch.setattr(train_module, "score_run", lambda *_: None)  # takes long
  folder, workdir = shutil.copytree(pieces, tmp_path / "pieces"), tmp_path / "run"
  bad, data = folder / "train" / "bad.mid", f"--config.data.midi.path={folder}"
  bad.write_bytes(b"MThd")
  answer = train_music(workdir, data)
  assert "1 of 11 MIDI files skipped, see skipped.txt" in answer.out
  (line,) = (workdir / "skipped.txt").read_text().splitlines()
  assert line.startswith(f"cannot read MIDI file {bad}")
  bad.unlink()
  assert train_music(workdir, data).status == 0
  assert not (workdir / "skipped.txt").exists()


def test_a_run_is_not_scored_on_other_pieces_than_its_own(run, call, pieces, tmp_path):
  workdir = shutil.copytree(run[0], tmp_path / "run")
  folder = shutil.copytree(pieces, tmp_path / "pieces")
  config = (workdir / "config.json").read_text()
  (workdir / "config.json").write_text(config.replace(str(pieces), str(folder)))
  shutil.copy(folder / "train" / "0.mid", folder / "test" / "1.mid")
  answer = call("evaluate", f"--workdir={workdir}")
  answer.assert_refused(f"the test data of {workdir} changed since restore")


@pytest.fixture
def sample(run, call, pieces, tmp_path):
  """Samples into a file, after the beginning of a piece."""
  prime = f"--prime={pieces / 'test' / '0.mid'}"
  flags = f"--workdir={run[0]}", prime, "--num_tokens=16", "--prime_tokens=32"

  def sample(name, *more):
    answer = call("sample", f"--out={tmp_path / name}", *flags, *more)
    assert answer.status == 0, answer.err
    return tmp_path / name

  return sample


def test_a_sample_continues_its_prime_as_the_seed_says(sample, pieces):
  files = sample("a.mid"), sample("b.mid", "--seed=1")
  a, b = (voices.CODEC.read(file).tolist() for file in files)
  assert a != b
  assert len(a) > 32
  prime = voices.CODEC.read(pieces / "test" / "0.mid")[:32].tolist()
  assert a[:32] == b[:32] == prime
  assert files[0].with_suffix(".png").stat().st_size > 5_000
  score = voices.CODEC.decode_score(np.array(a))
  write_wav(score, files[0].with_name("wanted.wav"))
  wanted = files[0].with_name("wanted.wav").read_bytes()
  assert sample("sound.wav").read_bytes() == wanted  # as the seed is the same


@pytest.mark.parametrize(
  "flags, words",
  [
    ("--out={folder}/new.mp3", "--out .mid .wav"),
    ("--out={folder}/new.mid --prime=nothing.mid", "nothing.mid"),
    ("--out={folder}/new.mid --top_p=1.5", "top_p=1.5 range"),
    ("--out={folder}/drawn.mid", "drawn.png exists another --out"),
  ],
)
def test_a_sample_that_cannot_be_drawn_is_refused(run, call, tmp_path, flags, words):
  (tmp_path / "drawn.png").touch()
  flags = flags.format(folder=tmp_path).split()
  call("sample", f"--workdir={run[0]}", *flags).assert_refused(words)
  assert not (tmp_path / "new.mid").exists()


def test_rows_that_have_no_room_for_four_voices_are_refused(train_music, tmp_path):
  answer = train_music(tmp_path / "run", "--config.batches.max_length=3")
  answer.assert_refused("config.batches.max_length is 3 give 4")
  assert not (tmp_path / "run").exists()


def test_runs_of_other_tasks_are_refused(run, call, workdir, tmp_path):
  out = f"--out={tmp_path}/new.mid"
  call("sample", f"--workdir={workdir}", out).assert_refused("translation music")
  call("translate", f"--workdir={run[0]}").assert_refused("music translation")
  assert not (tmp_path / "new.mid").exists()
