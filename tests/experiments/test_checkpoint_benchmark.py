"""What digests cost is measured with digests and without."""

import pytest

from experiments import checkpoint_benchmark
from relpos_jax.training.reading import Reader


def test_the_table_has_both_beside_the_noise_and_nothing_is_left(call, tmp_path):
  answer = call("checkpoint_benchmark", "--megabytes=1", "--repetitions=1", f"--folder={tmp_path}")
  assert answer.status == 0, answer.err
  names = [line.split(" | ")[0] for line in answer.out.splitlines()[4:]]
  assert names == [
    f"| {what} {how}"
    for what in ("save", "restore")
    for how in ("without digests (again)", "with digests", "digests alone")
  ]
  assert not answer.err and not [*tmp_path.iterdir()]


def test_those_without_have_none(tmp_path):
  functions, tidy = checkpoint_benchmark._savers(tmp_path, checkpoint_benchmark.make_state(1))
  for number, (name, save) in enumerate(functions.items()):
    save()
    entries = Reader(tmp_path / str(number)).entries(0)
    assert {entry.digest is None for entry in entries.values()} == {name != "with digests"}
  tidy()
  assert not tmp_path.exists()


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--megabytes=0", "--megabytes and --repetitions must be at least 1"),
    ("--repetitions=0", "--megabytes and --repetitions must be at least 1"),
    ("--folder=/nowhere", "no folder /nowhere: give another --folder"),
  ],
)
def test_mistakes_are_told_in_a_line(call, flag, words):
  answer = call("checkpoint_benchmark", flag)
  assert answer.status == 2 and words in answer.err and answer.err.count("\n") == 1
