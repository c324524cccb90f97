"""The one exception for a user's mistake."""


class InputError(ValueError):
  """Bad input: the message is one line that names the thing and the remedy.

  The commands print the message and exit with status 2; no traceback is shown.
  """
