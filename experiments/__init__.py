"""Commands that train, evaluate and measure: `python -m experiments.NAME --help`."""
