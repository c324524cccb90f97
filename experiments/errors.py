"""Defines the exception for mistakes of the user."""


class InputError(ValueError):
  """Reports a user's mistake in one line that names the problem and the remedy.

  Commands print the message without a traceback, and exit with status 2.
  """
