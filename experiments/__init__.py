"""Trains, evaluates and measures models: `python -m experiments.NAME --help`."""

import importlib.util
import signal
import sys

if sys.argv[:1] == ["-m"]:  # Python is importing a command
  # Until `command.run` handles Ctrl-C, it kills the process, so that an unfinished
  # import prints no traceback.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

  if importlib.util.find_spec("ml_collections") is None:
    remedy = "pip install -e '.[experiments]'"
    print(f"error: commands need more packages: {remedy}", file=sys.stderr)
    sys.exit(2)
