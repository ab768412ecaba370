"""The one exception for a user's mistake."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """A bad config, input, file or checkpoint, explained in one line.

  The message names the field or file, the value, the rule and the nearest valid choice.
  `main` prints it without a traceback and exits with code 2.
  """


def nearest(name: str, valid: Iterable[str]) -> str:
  """Returns '; did you mean "x"?' for the closest valid name, else lists the valid ones."""
  valid = list(valid)
  close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
  return f'; did you mean "{close[0]}"?' if close else f'; valid: {", ".join(valid)}'
