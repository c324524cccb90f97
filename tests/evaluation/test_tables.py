"""Intervals equal scipy's, and pages are complete."""

import errno
import os

import pytest

from experiments.evaluation.tables import rewrite_sections, student_interval


def test_welch_of_values_without_any_spread():
  assert student_interval([2.0, 2.0], [1.0, 1.0]) == (1.0, 0.0)


def test_a_page_may_end_without_a_newline(tmp_path):
  page = tmp_path / "page.md"
  page.write_text("text\n<!-- begin a -->\nold\n<!-- end a -->")
  rewrite_sections(page, {"a": "new"})
  assert page.read_text() == "text\n<!-- begin a -->\nnew\n<!-- end a -->\n"


def test_a_page_that_cannot_be_written_keeps_its_content(tmp_path, monkeypatch):
  page = tmp_path / "page.md"
  rewrite_sections(page, {"first": "text", "second": "more"})
  before = page.read_text()

  def fail(*_):
    raise OSError(errno.ENOSPC, "the disk is full")

  monkeypatch.setattr(os, "replace", fail)
  with pytest.raises(OSError, match="full"):
    rewrite_sections(page, {"first": "other text"})
  assert [*tmp_path.iterdir()] == [page]
  assert page.read_text() == before
