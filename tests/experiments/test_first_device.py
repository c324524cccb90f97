"""Runs the script for the first accelerator with a stand-in for Python, and as toys."""

import os
import pathlib
import subprocess

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments" / "first_device.sh"

# Describes a GPU and keeps the words of other commands; steps fail, music hangs.
PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then
  printf 'gpu an-h100\\n{"devices": "1 x An H100"}\\n'
  exit
fi
printf '%s\\n' "$@" >"$(mktemp "$RECORDS/XXXXXX")"
[[ $* == *music.py* ]] && sleep 60
[[ $* != *' step '* ]]
"""


def run_script(folder, **env):
  words = ["bash", SCRIPT, f"--out={folder}/out"]
  return subprocess.run(words, env=os.environ | env, capture_output=True, text=True)


def run_pieces(folder, **env):
  """Runs the script; returns its status, its output, and the commands of its pieces."""
  records = folder / "records" / str(len([*folder.glob("records/*")]))
  records.mkdir(parents=True)
  path = f"{folder}:{os.environ['PATH']}"
  answer = run_script(folder, PATH=path, LIMIT="1", RECORDS=str(records), **env)
  files = sorted(records.iterdir(), key=lambda file: file.stat().st_mtime_ns)
  commands = [file.read_text().splitlines() for file in files]
  return answer.returncode, answer.stdout, commands


def test_all_pieces_run_and_only_the_open_ones_again(tmp_path):
  (tmp_path / "python").write_text(PYTHON)
  (tmp_path / "python").chmod(0o755)
  status, output, commands = run_pieces(tmp_path)
  folder = tmp_path / "out" / "first_device"
  assert status == 1
  assert "music: stopped" in output
  assert "step_big: exit status 1" in output
  failed = {path.stem for path in folder.glob("*.failed")}
  assert failed == {"music", "step_base", "step_big"}
  assert "An H100" in (folder / "table1.log").read_text()
  assert len(commands) == len([*folder.iterdir()]) + 1 == 18
  assert commands[-1][2] == "claims"

  status, output, commands = run_pieces(tmp_path)
  assert status == 1
  assert "table1: done before" in output
  called = [words[2] for words in commands]
  assert called == ["step", "step", "--config=configs/music.py:published", "claims"]


def test_no_piece_begins_after_the_minutes(tmp_path):
  (tmp_path / "python").write_text(PYTHON)
  (tmp_path / "python").chmod(0o755)
  status, output, commands = run_pieces(tmp_path, SECONDS="1200")
  assert status == 1
  assert "not done: parity_bfloat16 attention" in output
  assert [words[2] for words in commands] == ["claims"]
