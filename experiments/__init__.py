"""Thin commands, and packages of what the larger ones are made of."""

import signal
import sys

if sys.argv[0] == "-m" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  # While the command is imported: a KeyboardInterrupt could be lost in one of JAX's callbacks.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
