"""What is not there: optional packages and the network, each found out at once."""

import importlib.util
import threading

from aogpt_jax.errors import UserError

_PATIENCE = 5.0  # seconds; the libraries' own retries take minutes


def require(package: str, extra: str, what: str) -> None:
  """UserError that names the extra to install, if a package is not there.

  Args:
    package: as it is imported.
    extra: of this package, which brings it.
    what: what needs it; begins the message.
  """
  if importlib.util.find_spec(package) is None:
    raise UserError(f"{what}: needs the package {package}; pip install 'aogpt_jax[{extra}]'")


def reachable(url: str) -> bool:
  """Whether the host of a URL answers, whatever it answers, within a few seconds."""
  answers: list[bool] = []
  # In a thread: looking up a host's name has no time limit of its own.
  thread = threading.Thread(target=lambda: answers.append(_answers(url)), daemon=True)
  thread.start()
  thread.join(_PATIENCE + 1)
  return answers == [True]


def _answers(url: str) -> bool:
  import urllib.error
  import urllib.request
  try:
    request = urllib.request.Request(url, method='HEAD')
    with urllib.request.urlopen(request, timeout=_PATIENCE):
      return True
  except urllib.error.HTTPError:
    return True
  except (OSError, ValueError):
    return False
