"""Files appear whole, whoever else writes them; paths mean what they do in a shell."""

import contextlib

import pytest

from experiments.errors import InputError
from experiments.files import replace_file, to_path


def test_commands_that_write_one_file_at_once_publish_whole_files_alone(tmp_path):
  path = tmp_path / "results.json"
  with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
    whole, half = (stack.enter_context(replace_file(path)) for stack in (first, second))
    whole.write(b"of the first")
    half.write(b"of the sec")
    first.close()
    assert path.read_bytes() == b"of the first"
    half.write(b"ond")
    second.close()
    assert path.read_bytes() == b"of the second"
  assert [*tmp_path.iterdir()] == [path]


def test_a_path_below_the_home_is_expanded(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  assert to_path("~/runs/x") == tmp_path / "runs" / "x"
  with pytest.raises(InputError, match="cannot use ~nobody-at-all/x: "):
    to_path("~nobody-at-all/x")
