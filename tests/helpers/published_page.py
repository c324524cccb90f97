"""The functions of docs/published.md."""

import functools
import pathlib
import re
import types
from typing import Any

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "published.md"


@functools.cache
def code() -> str:
  text = PAGE.read_text("utf-8")
  return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@functools.cache
def page() -> types.SimpleNamespace:
  """Returns the functions of the page."""
  names: dict[str, Any] = {}
  exec(code(), names)
  return types.SimpleNamespace(**names)
