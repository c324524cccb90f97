"""Hooks of the documentation's build."""

import configparser
import html
import pathlib
import re

import griffe
from latex2mathml.converter import convert

# A formula of a page or a notebook; or code, which has none and is left as it is.
_CODE = r"<(pre|code|script|style)\b.*?</\1>"
_FORMULA = r"\\\[(.+?)\\\]|\$\$(.+?)\$\$|\\\((.+?)\\\)|\$([^$<>]+)\$"

# Chat programs and social networks show these beside a link.
# The picture is docs/idea.svg below a title.
_CARD = """\
<meta property="og:type" content="website">
<meta property="og:title" content="{title}">
<meta property="og:description" content="{description}">
<meta property="og:image" content="{image}">
<meta name="twitter:card" content="summary_large_image">
</head>"""


def on_config(config, **_):
  """Takes the repository's address from setup.cfg."""
  setup = configparser.ConfigParser()
  setup.read(pathlib.Path(__file__).parents[1] / "setup.cfg")
  config.repo_url = setup["metadata"]["url"]
  config.repo_name = config.repo_url.removeprefix("https://github.com/")
  return config


def on_post_page(output: str, page, config) -> str:
  """Adds a card for sharing."""
  is_home = page.file.src_uri == "README.md"
  title = config.site_name if is_home else f"{page.title} - {config.site_name}"
  card = _CARD.format(
    title=html.escape(title),
    description=html.escape(config.site_description),
    image=f"{config.repo_url}/raw/main/docs/card.png",  # must be a whole address
  )
  return on_post_template(output).replace("</head>", card, 1)


def on_post_template(output: str, **_) -> str:
  """Stops the link to the repository from asking GitHub for its stars."""
  return output.replace(' data-md-component="source"', "")


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
    """Makes code blocks of examples without heading, and one name of "key, value:"."""
    if obj.docstring:
      text = re.sub(
        r"^>>> (?:.+\n?)+", r"```pycon\n\g<0>\n```\n", obj.docstring.value, flags=re.M
      )
      names = r"^  (?:\w+, )+\w+:"
      text = re.sub(
        names, lambda match: match[0].replace(", ", ",\xa0"), text, flags=re.M
      )
      obj.docstring.value = text
