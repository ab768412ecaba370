"""Command-line flags: a mistake in one is a single line."""

import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from absl import flags

from aogpt_jax import config as config_lib
from aogpt_jax.errors import UserError, nearest


def fail(message: object) -> NoReturn:
  """Prints one line and ends the process with exit code 2."""
  print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
  sys.exit(2)


def _unknown_field(error: Exception) -> str | None:
  """One line for what ml_collections says, over several, of a key that is not in the config.

  None if the error is another one: a bug in a config file, which its author wants to see whole.
  """
  message = str(error.args[0] if error.args else error)
  quoted = (re.search(r'(?:Key |instead of )"([^"]+)"', message)
            or re.fullmatch(r'\W*([\w.]+)\W*', message))
  if not quoted:
    return None
  names = [*config_lib.flatten(config_lib.Config())]
  names = {part for name in names for part in name.split('.')}
  return f'--config: no field "{quoted[1]}"{nearest(quoted[1].split(".")[-1], sorted(names))}'


def parse(argv: list[str]) -> list[str]:
  """absl's parser, with a config file's or an override's mistakes as one line each."""
  try:
    return flags.FLAGS(argv)
  except (AttributeError, KeyError) as error:
    message = _unknown_field(error)
    if message is None:
      raise
    fail(message)
  except flags.Error as error:
    cause: BaseException = error
    while cause.__context__:  # what get_config raised lies below two layers of rewording
      cause = cause.__context__
    if 'get_config() takes 0' in str(cause):
      fail('--config: this file has no variants; leave out the colon and what follows it')
    if isinstance(cause, UserError):
      fail(f'--config: {cause}')
    if 'Traceback' in str(error):  # a bug in a config file
      raise
    fail(error)


def check_given(mode: str, needed: Iterable[str], others: Iterable[str]) -> None:
  """Raises UserError unless all flags `needed` are given, and none of the `others`."""
  for name in needed:
    if not flags.FLAGS[name].present:
      raise UserError(f'--{name} is missing; --mode={mode} needs --{" and --".join(needed)}')
  for name in sorted(others):
    if flags.FLAGS[name].present:
      raise UserError(f'--{name} is not used by --mode={mode}; leave it out')
