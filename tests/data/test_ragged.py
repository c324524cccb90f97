"""Rows stored in one array equal the rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relpos_jax.data.ragged import Ragged

rows = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), max_size=8)


@given(rows)
def test_the_rows_come_back(rows):
  ragged = Ragged.of(rows)
  assert [row.tolist() for row in ragged] == rows
  assert ragged.lengths.tolist() == [*map(len, rows)]
  assert [ragged[i - len(rows)].tolist() for i in range(len(rows))] == rows


@given(rows.filter(bool), st.data())
def test_padding_equals_a_loop(rows, data):
  chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
  length = max(map(len, rows)) + data.draw(st.integers(0, 2))
  expected = [rows[i] + [7] * (length - len(rows[i])) for i in chosen] + [[7] * length] * 2
  padded = Ragged.of(rows).padded(np.array(chosen, int), (len(chosen) + 2, length), 7)
  assert padded.tolist() == expected
  assert padded.dtype == np.int32
