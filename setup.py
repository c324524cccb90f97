"""Makes README.md the package's page, with whole addresses; setup.cfg has the rest."""

import configparser
import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
setup_cfg = configparser.ConfigParser()
setup_cfg.read(ROOT / "setup.cfg")
url = setup_cfg["metadata"]["url"]

page = (ROOT / "README.md").read_text("utf-8")
page = re.sub(r"(!\[[^\]]*\]\()(?!https:)", rf"\1{url}/raw/main/", page)
page = re.sub(r"(\]\()(?!https:)", rf"\1{url}/blob/main/", page)

setuptools.setup(long_description=page)
