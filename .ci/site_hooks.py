"""Hooks of the documentation's build."""

import html
import re

import griffe
from latex2mathml.converter import convert

# A formula of a page or a notebook; or code, which has none and is left as it is.
_CODE = r"<(pre|code|script|style)\b.*?</\1>"
_FORMULA = r"\\\[(.+?)\\\]|\$\$(.+?)\$\$|\\\((.+?)\\\)|\$([^$<>]+)\$"


def on_page_content(text: str, **_) -> str:
  """Turns formulas into MathML, which browsers draw without a script."""

  def draw(match: re.Match) -> str:
    _, *formulas = match.groups()
    tex = "".join(filter(None, formulas))
    display = "block" if any(formulas[:2]) else "inline"
    return convert(html.unescape(tex), display=display) if tex else match[0]

  return re.sub(f"{_CODE}|{_FORMULA}", draw, text, flags=re.DOTALL)


class Docstrings(griffe.Extension):
  """Reads docstrings as this project writes them."""

  def on_instance(self, *, obj: griffe.Object, **_) -> None:
    """Makes code blocks of examples, which have no heading, and one name of "key, value:"."""
    if obj.docstring:
      text = re.sub(r"^>>> (?:.+\n?)+", r"```pycon\n\g<0>\n```\n", obj.docstring.value, flags=re.M)
      names = r"^  (?:\w+, )+\w+:"
      text = re.sub(names, lambda match: match[0].replace(", ", ",\xa0"), text, flags=re.M)
      obj.docstring.value = text
