"""Tests the hooks of the documentation's build; the build itself checks its links."""

import configparser
import pathlib
import re
import runpy
import types

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HEAD = '<head></head><a href="" class="md-source" data-md-component="source">'


@pytest.mark.parametrize(
  "file, title", [("README.md", "site"), ("docs/a.md", "A &lt;b&gt; - site")]
)
def test_a_page_has_a_card_with_a_picture_of_the_repository(file, title):
  pytest.importorskip("griffe")
  hooks = runpy.run_path(str(ROOT / ".ci/site_hooks.py"))
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  config = types.SimpleNamespace(site_name="site", site_description="of 2 > 1 pages")
  page = types.SimpleNamespace(title="A <b>", file=types.SimpleNamespace(src_uri=file))

  hooks["on_config"](config)
  text = hooks["on_post_page"](HEAD, page=page, config=config)

  assert config.repo_url == setup["metadata"]["url"]
  card = dict(re.findall(r'<meta \w+="(?:og|twitter):(\w+)" content="(.*)">', text))
  assert card["title"] == title
  assert card["description"] == "of 2 &gt; 1 pages"
  picture = card["image"].removeprefix(f"{config.repo_url}/raw/main/")
  assert (ROOT / picture).is_file()
  assert "data-md-component" not in text  # the theme's script would ask GitHub
