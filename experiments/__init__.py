"""Commands that train, evaluate and measure: `python -m experiments.NAME --help`."""

import importlib.util
import sys

if importlib.util.find_spec("ml_collections") is None:
  print("error: commands need more packages: pip install -e '.[experiments]'", file=sys.stderr)
  sys.exit(2)
