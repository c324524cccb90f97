"""The script for the first accelerator: its pieces with a stand-in for Python, and as toys."""

import os
import pathlib
import subprocess
import sys

import pytest

from experiments import command, sweep
from experiments.benchmark.__main__ import COMMANDS

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments" / "first_device.sh"

# Describes a GPU to the script, and keeps the words of other commands; steps fail,
# music hangs.
PYTHON = """#!/bin/bash
if [[ $1 == - ]]; then
  printf 'gpu an-h100\\n{"devices": "1 x An H100"}\\n'
  exit
fi
printf '%s\\n' "$@" >"$(mktemp "$RECORDS/XXXXXX")"
[[ $* == *music.py* ]] && sleep 60
[[ $* != *' step '* ]]
"""


def run(folder):
  """Runs the script; returns its status, its output, and the commands of its pieces."""
  records = folder / "records" / str(len([*folder.glob("records/*")]))
  records.mkdir(parents=True)
  path = f"{folder}:{os.environ['PATH']}"
  env = dict(os.environ, PATH=path, LIMIT="1", RECORDS=str(records))
  answer = subprocess.run(
    ["bash", SCRIPT, f"--out={folder}/out"], env=env, capture_output=True
  )
  files = sorted(records.iterdir(), key=lambda file: file.stat().st_mtime_ns)
  return (
    answer.returncode,
    answer.stdout.decode(),
    [x.read_text().splitlines() for x in files],
  )


def test_all_pieces_run_and_only_the_open_ones_again(tmp_path):
  (tmp_path / "python").write_text(PYTHON)
  (tmp_path / "python").chmod(0o755)
  status, output, commands = run(tmp_path)
  logs = {path.name for path in (tmp_path / "out" / "first_device").iterdir()}
  assert (
    status == 1 and "music: stopped" in output and "step_big: exit status 1" in output
  )
  assert {"parity_bfloat16.log", "attention.log", "table3.log"} < logs
  failed = {"music.failed", "step_base.failed", "step_big.failed"}
  assert {x for x in logs if x.endswith(".failed")} == failed
  assert "An H100" in (tmp_path / "out" / "first_device" / "table1.log").read_text()
  assert len(commands) == len(logs) == 16
  for module, name, *flags in (words[1:] for words in commands):
    if module == "experiments.benchmark":
      values = command.parse(COMMANDS[name], flags)
    elif module == "experiments.sweep":
      values = command.parse(sweep.FLAGS, [name, *flags])
      assert values["seeds"] == 3 and values["results"] == tmp_path / "out"
    else:
      assert module == "pytest" and "device" in flags
  status, output, commands = run(tmp_path)
  assert status == 1 and "table1: done before" in output
  assert [words[1] for words in commands] == [
    "experiments.sweep",
    *["experiments.benchmark"] * 2,
  ]


@pytest.mark.slow
def test_every_piece_runs_at_toy_size(shared_data, tmp_path):
  path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
  env = dict(os.environ, PATH=path, TOY="1", DATA=str(shared_data))
  env["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "compiled")
  answer = subprocess.run(
    ["bash", SCRIPT, f"--out={tmp_path}/out"], env=env, capture_output=True
  )
  assert answer.returncode == 0, answer.stdout
