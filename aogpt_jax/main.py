"""The command line: python -m aogpt_jax.main --config=FILE --workdir=DIR [--mode=…].

--config names a Python file whose get_config() returns an ml_collections ConfigDict, such as
configs/quickstart.py; single fields are overridden by --config.model.num_layers=6 after it.
"""

import importlib
import logging
import os
import pathlib
import re
import sys
from typing import Any, NoReturn

from absl import app, flags, logging as absl_logging
from ml_collections import config_flags

from aogpt_jax import config as config_lib
from aogpt_jax.errors import UserError, nearest

MODES = ('train', 'sample')

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file; override fields with --config.section.field=value after it.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run: written by train, read by '
                               'the other modes.')
_MODE = flags.DEFINE_enum('mode', 'train', MODES, 'What to do.')
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'train: delete the run in --workdir first.')


def _fail(message: object) -> NoReturn:
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


def _parse_flags(argv: list[str]) -> list[str]:
  """absl's parser, with a config file's or an override's mistakes as one line each."""
  try:
    return flags.FLAGS(argv)
  except (AttributeError, KeyError) as error:
    message = _unknown_field(error)
    if message is None:
      raise
    _fail(message)
  except flags.Error as error:
    cause: BaseException = error
    while cause.__context__:  # what get_config raised lies below two layers of rewording
      cause = cause.__context__
    if 'get_config() takes 0' in str(cause):
      _fail('--config: this file has no variants; leave out the colon and what follows it')
    if isinstance(cause, UserError):
      _fail(f'--config: {cause}')
    if 'Traceback' in str(error):  # a bug in a config file
      raise
    _fail(error)


def _config_values() -> dict[str, Any]:
  """The ConfigDict as a dict; a config file that cannot be read shows up here, not in parsing."""
  try:
    return dict(_CONFIG.value)
  except OSError as error:  # several lines about the places that were tried
    raise UserError(f'--config: {str(error).splitlines()[-1]}') from None


def main(argv: list[str]) -> None:
  """Validates the config, then runs one job; a user's mistake ends in one line and exit code 2."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  # Orbax and TFDS report every file through absl; ours are the lines a person wants.
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.getLogger('aogpt_jax').setLevel(logging.INFO)
  try:
    config = config_lib.from_dict(_config_values())
    workdir = pathlib.Path(os.path.expanduser(_WORKDIR.value)).absolute()
    job = importlib.import_module(f'aogpt_jax.jobs.{_MODE.value}')
    if _MODE.value == 'train':
      job.run(config, workdir, overwrite=_OVERWRITE.value)
    else:
      job.run(config, workdir)
  except UserError as error:
    _fail(error)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)
  except OSError as error:
    if error.errno is None:
      raise
    _fail(f'{error.filename or _WORKDIR.value}: {error.strerror}')  # a full disk, lost rights, …


def cli() -> None:
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main, flags_parser=_parse_flags)


if __name__ == '__main__':
  cli()
