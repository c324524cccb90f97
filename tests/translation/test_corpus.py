"""Options reach the source; lazy splits equal lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relpos_jax.data import builders
from relpos_jax.data.builders import LazyPairs
from relpos_jax.translation.corpus import load_corpus


class _BulkOnly(list):
  """A sequence that refuses to be read one by one when it is iterated."""

  def __getitems__(self, indices):
    return [list.__getitem__(self, index) for index in indices]

  def __getitem__(self, index):
    raise AssertionError("read one by one")


def _pair(number):
  return (str(number), str(-number))


def test_options_reach_the_source(tmp_path):
  (tmp_path / "a.tsv").write_text("x\ty\n")
  corpus = load_corpus("pairs", train=f"{tmp_path}/a.tsv")
  assert dict(corpus.splits) == {"train": [("x", "y")]}


@given(st.lists(st.integers()), st.slices(20), st.integers(1, 5))
def test_lazy_pairs_read_as_the_list_of_them(numbers, part, read_ahead):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(builders, "_READ_AHEAD", read_ahead)
    lazy, eager = LazyPairs(numbers, _pair), [_pair(number) for number in numbers]
    assert list(lazy) == eager
    assert len(lazy) == len(eager)
    assert list(lazy[part]) == eager[part]
    assert [lazy[i] for i in range(-len(lazy), len(lazy))] == eager * 2
    with pytest.raises(IndexError):
      lazy[len(lazy)]


def test_lazy_pairs_are_iterated_in_bulk():
  assert list(LazyPairs(_BulkOnly([1, 2, 3]), _pair)) == [_pair(1), _pair(2), _pair(3)]
