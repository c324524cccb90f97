"""Commands that train, evaluate and measure: `python -m experiments.NAME --help`."""

import importlib.util
import signal
import sys

# Python is importing a command for `python -m`. Ctrl-C ends it without a traceback of
# that import. `command.run` handles it later.
if (
  sys.argv[:1] == ["-m"]
  and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
  signal.signal(signal.SIGINT, signal.SIG_DFL)

if importlib.util.find_spec("ml_collections") is None:
  print(
    "error: commands need more packages: pip install -e '.[experiments]'",
    file=sys.stderr,
  )
  sys.exit(2)
