"""Scores a position scheme in ten CPU minutes.

  python -m experiments.ten_minutes --scheme=kerple
  python -m experiments.sweep --config=configs/ten_minutes.py --results=mine

This is the quickstart with half of its updates. The schemes are those of
`configs/positions.py`, and one for each file NAME.py in `results/ten_minutes/`. Such a
file has a class `Scheme`, which reaches distances up to 128.
"""

import pathlib

from configs import positions, quickstart

FOLDER = pathlib.Path(__file__).parents[1] / "results" / "ten_minutes"


def get_config():
  """Returns the config with Shaw's positions."""
  config = quickstart.get_config()
  config.name = "ten_minutes"
  config.training.num_steps = 1_000
  return config


def sweep():
  yield from positions.sweep()
  for file in sorted(FOLDER.glob("*.py")):
    scheme = f"results.ten_minutes.{file.stem}:Scheme"
    yield file.stem, {"model.positions": scheme, "model.max_distance": 128}
