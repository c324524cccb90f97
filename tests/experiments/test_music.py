"""Training, scoring and sampling of music by the commands."""

import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest

from experiments.music import piano_roll, voices
from experiments.music.scores import likelihood, make_nats_function
from experiments.music.sound import write_wav
from experiments.music.train import load_data, load_run
from experiments.systems import load_config
from experiments.training.run import copy_to_process

pytestmark = pytest.mark.usefixtures("in_the_repository")

SMALL = (
  *(
    "model.num_layers=1",
    "model.width=16",
    "model.num_heads=2",
    "model.feed_forward=16",
  ),
  *(
    "model.max_distance=8",
    "batches.tokens=256",
    "batches.max_length=64",
    "batches.num_shapes=1",
  ),
  *(
    "training.num_steps=6",
    "training.eval_every=6",
    "training.save_every=3",
    "mesh.data=1",
  ),
)
NUM_STEPS = 24  # of each piece: longer than a row


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> pathlib.Path:
  """Writes a folder of MIDI files: random walks of four voices."""
  folder = tmp_path_factory.mktemp("pieces")
  random = np.random.default_rng(0)
  for split, number in dict(train=6, valid=2, test=2).items():
    (folder / split).mkdir()
    for piece in range(number):
      steps = np.cumsum(random.integers(-1, 2, (NUM_STEPS, 4)), axis=0)
      grid = np.array([72, 67, 60, 48]) + steps % 5
      voices.CODEC.write(voices.encode(grid), folder / split / f"{piece}.mid")
  return folder


@pytest.fixture(scope="module")
def train_music(trainer, pieces):
  """Returns the command train on the folder: train_music(workdir, "--config.seed=1")."""
  data = ("data.source=midi", f"data.midi.path={pieces}", "data.midi.codec=voices")
  return trainer("configs/music.py", *SMALL, *data)


@pytest.fixture(scope="module")
def run(train_music, tmp_path_factory):
  """Returns the folder of a finished run, not to be changed, and the command's output."""
  workdir = tmp_path_factory.mktemp("music") / "run"
  answer = train_music(workdir)
  assert answer.status == 0, answer.err
  return workdir, answer


def test_a_run_is_scored_by_the_likelihood_of_complete_pieces(run, pieces):
  workdir, answer = run
  loaded = load_run(load_config(workdir), workdir)
  music = load_data(loaded.config)
  nats_of = make_nats_function(loaded.graphdef, copy_to_process(loaded.params))
  results = json.loads((workdir / "results.json").read_text())
  record = json.loads((workdir / "record.json").read_text())
  for split in ("valid", "test"):
    wanted, _ = likelihood(nats_of, music.splits[split], voices.times, token_budget=128)
    for name, value in wanted.items():
      assert results[split][name] == pytest.approx(value, rel=1e-5)
    assert record["scores"][split]["nll"] == results[split]["nll"]
    assert f"{results[split]['nll']:.4f}" in answer.out
  for name in ("piano_roll.png", "learning_curves.png"):
    assert (workdir / name).stat().st_size > 5_000 and name in answer.out


def test_skipped_files_are_listed_in_the_run_directory(
  run, train_music, pieces, tmp_path
):
  folder, workdir = shutil.copytree(pieces, tmp_path / "pieces"), tmp_path / "run"
  bad = folder / "train" / "bad.mid"
  bad.write_bytes(b"MThd")
  train = lambda: train_music(workdir, f"--config.data.midi.path={folder}")
  assert "1 of 11 MIDI files skipped, see skipped.txt" in train().out
  (line,) = (workdir / "skipped.txt").read_text().splitlines()
  assert line.startswith(f"cannot read MIDI file {bad}")
  bad.unlink()
  assert train().status == 0 and not (workdir / "skipped.txt").exists()
  assert not (run[0] / "skipped.txt").exists()


def test_a_run_is_not_scored_on_other_pieces_than_its_own(run, call, pieces, tmp_path):
  workdir = shutil.copytree(run[0], tmp_path / "run")
  config = json.loads((workdir / "config.json").read_text())
  folder = config["data"]["midi"]["path"] = str(
    shutil.copytree(pieces, tmp_path / "pieces")
  )
  (workdir / "config.json").write_text(json.dumps(config))
  evaluate = lambda: call("evaluate", f"--workdir={workdir}")
  assert evaluate().status == 0
  shutil.copy(f"{folder}/train/0.mid", f"{folder}/test/1.mid")
  evaluate().assert_refused(f"the test data of {workdir} changed since restore")


def test_a_sample_continues_its_prime(run, call, pieces, tmp_path):
  prime = pieces / "test" / "0.mid"
  sample = lambda name, *flags, suffix=".mid": call(
    *(
      "sample",
      f"--workdir={run[0]}",
      f"--prime={prime}",
      f"--out={tmp_path}/{name}{suffix}",
    ),
    *("--num_tokens=16", "--prime_tokens=32", *flags),
  )
  answers = sample("a"), sample("b"), sample("c", "--seed=1")
  assert [answer.status for answer in answers] == [0, 0, 0], answers
  a, b, c = (voices.CODEC.read(tmp_path / f"{name}.mid") for name in "abc")
  np.testing.assert_array_equal(a, b)
  assert len(a) > 32 and a.tolist() != c.tolist()
  for piece in (a, c):
    np.testing.assert_array_equal(piece[:32], voices.CODEC.read(prime)[:32])
  assert (tmp_path / "a.png").stat().st_size > 5_000
  answer = sample("sound", suffix=".wav")
  assert answer.status == 0, answer
  write_wav(voices.CODEC.decode_score(a), tmp_path / "wanted.wav")
  assert (tmp_path / "sound.wav").read_bytes() == (tmp_path / "wanted.wav").read_bytes()


def test_mistakes_are_one_line(run, call, train_music, pieces, workdir, tmp_path):
  own, out = f"--workdir={run[0]}", f"--out={tmp_path}/new.mid"
  prime = pieces / "test" / "0.mid"
  own_prime = shutil.copy(prime, tmp_path / "own.mid")
  (tmp_path / "drawn.png").touch()
  no_valid = tmp_path / "pieces"
  (no_valid / "train").mkdir(parents=True)
  shutil.copy(prime, no_valid / "train")
  sample = lambda *flags: call("sample", own, *flags)
  train = lambda change: train_music(tmp_path / "run", f"--config.{change}")
  for answer, words in (
    (sample(f"--out={tmp_path}/new.mp3"), "--out .mid .wav"),
    (sample(out, "--prime=nothing.mid"), "nothing.mid"),
    (sample(out, "--top_p=1.5"), "top_p=1.5 range"),
    (sample(out, "--num_tokens=0"), "num_tokens=0 positive integer"),
    (sample(out, "--temperature=nan"), "temperature=nan finite"),
    (
      sample(f"--out={own_prime}", f"--prime={own_prime}"),
      "own.mid exists another --out",
    ),
    (sample(f"--out={tmp_path}/drawn.mid"), "drawn.png exists another --out"),
    (call("sample", f"--workdir={workdir}", out), "translation music"),
    (call("translate", own), "music translation"),
    (train("data.transpose=200"), "data.transpose is 200"),
    (train("data.midi.path="), "--config.data.midi.path"),
    (train(f"data.midi.path={no_valid}"), "no file for valid"),
  ):
    answer.assert_refused(words)
  assert not (tmp_path / "new.mid").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_tokens", [0, 32])
def test_attention_on_all_tokens_and_the_begin_is_drawn(
  run, pieces, tmp_path, monkeypatch, num_tokens
):
  draw = mock.Mock(wraps=piano_roll._draw_attention)
  monkeypatch.setattr(piano_roll, "_draw_attention", draw)
  piece = voices.CODEC.read(pieces / "test" / "0.mid")[:num_tokens]
  assert (
    piano_roll.draw(load_run(load_config(run[0]), run[0]), piece, tmp_path / "a.png")
    .stat()
    .st_size
    > 5_000
  )
  _, weights, *_ = draw.call_args[0]
  np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
  assert weights.shape[-1] == num_tokens + 1
