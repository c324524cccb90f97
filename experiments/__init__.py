"""Commands that train, evaluate and measure: `python -m experiments.NAME --help`."""

import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  # During imports, Ctrl-C ends the process: JAX's callbacks could swallow a KeyboardInterrupt.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
