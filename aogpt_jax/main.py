"""The command line: python -m aogpt_jax.main --config=FILE --workdir=DIR [--mode=…].

--config names a Python file whose get_config() returns an ml_collections ConfigDict, such as
configs/quickstart.py; single fields are overridden by --config.model.num_layers=6 after it.

--mode=convert --source=x.pt --destination=RUN, or --source=RUN --destination=x.pt, needs neither:
it makes a run of a PyTorch checkpoint of the reference, or the other way round.
"""

import importlib
import logging
import os
import pathlib
import sys
from typing import Any

from absl import app, flags, logging as absl_logging
from ml_collections import config_flags

from aogpt_jax import config as config_lib, flag_parsing
from aogpt_jax.errors import UserError

MODES = ('train', 'prepare', 'sample', 'infill', 'convert', 'bench')

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file; override fields with --config.section.field=value after it.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run: written by train, read by '
                               'the other modes.')
_MODE = flags.DEFINE_enum('mode', 'train', MODES, 'What to do.')
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'train: delete the run in --workdir first; '
                               'convert: replace the .pt file --destination.')
_SOURCE = flags.DEFINE_string('source', None, 'convert: a .pt file, a run, or one step of it.')
_DESTINATION = flags.DEFINE_string('destination', None, 'convert: a new run, or a .pt file.')
_CONTEXT_LENGTH = flags.DEFINE_integer('context_length', None, 'convert, from .pt: keep the '
                                       'positions below it alone.')
_OUTPUT = flags.DEFINE_string('output', None, 'sample, infill: file of JSON lines; - for stdout.')
_HTML = flags.DEFINE_string('html', None, 'sample, infill: a page that plays the generation.')
_TEXT = flags.DEFINE_string('text', None, 'infill: a text with holes, <mask:k> for k tokens.')
_INPUT = flags.DEFINE_string('input', None, 'infill: a file of such lines; - for stdin.')
_SAMPLER = flags.DEFINE_string('sampler', None, 'sample, infill: parallel, sequential, speculative '
                               'or adaptive; short for --config.sample.sampler.')
_SUITE = flags.DEFINE_enum('suite', 'samplers', ('samplers', 'encoder', 'prepare'),
                           'bench: what to measure.')
# The flags that belong to some modes alone.
MODE_FLAGS = {
    'train': ('config', 'workdir', 'overwrite'),
    'prepare': ('config', 'workdir'),
    'sample': ('config', 'workdir', 'output', 'html', 'sampler'),
    'infill': ('config', 'workdir', 'output', 'html', 'sampler', 'text', 'input'),
    'bench': ('config', 'workdir', 'suite'),
    'convert': ('source', 'destination', 'context_length', 'overwrite')}


def _config_values() -> dict[str, Any]:
  """The ConfigDict as a dict; a config file that cannot be read shows up here, not in parsing."""
  try:
    return dict(_CONFIG.value)
  except OSError as error:  # several lines about the places that were tried
    raise UserError(f'--config: {str(error).splitlines()[-1]}') from None


def _path(text: str) -> pathlib.Path:
  return pathlib.Path(os.path.expanduser(text)).absolute()


def _run() -> None:
  mode = _MODE.value
  allowed = MODE_FLAGS[mode]
  needed = allowed[:1] if _SUITE.value in ('encoder', 'prepare') else allowed[:2]
  flag_parsing.check_given(mode, needed, {f for fs in MODE_FLAGS.values() for f in fs} -
                           set(allowed))
  if mode == 'convert':
    job = importlib.import_module('aogpt_jax.jobs.convert')
    return job.run(_path(_SOURCE.value), _path(_DESTINATION.value), _CONTEXT_LENGTH.value,
                   _OVERWRITE.value)
  values = _config_values()
  if _SAMPLER.value is not None:
    values['sample'] = dict(values['sample']) | {'sampler': _SAMPLER.value}
  config = config_lib.from_dict(values)
  workdir = _path(_WORKDIR.value or '.')
  job = importlib.import_module(f'aogpt_jax.jobs.{mode}')
  if mode == 'train':
    return job.run(config, workdir, overwrite=_OVERWRITE.value)
  if mode == 'bench':
    return job.run(config, workdir, _SUITE.value)
  if mode == 'prepare':
    return job.run(config, workdir)
  from aogpt_jax.jobs import outputs
  destination = outputs.Destination(_OUTPUT.value or '', _HTML.value or '')
  destination.check(_INPUT.value)
  if mode == 'infill':
    return job.run(config, workdir, destination, _TEXT.value, _INPUT.value)
  return job.run(config, workdir, destination)


def main(argv: list[str]) -> None:
  """Validates the config, then runs one job; a user's mistake ends in one line and exit code 2."""
  if len(argv) > 1:
    flag_parsing.fail(f'unexpected arguments {argv[1:]}; a value with spaces needs quotes')
  # Orbax and TFDS report every file through absl; ours are the lines a person wants.
  absl_logging.set_verbosity(absl_logging.WARNING)
  logging.getLogger('aogpt_jax').setLevel(logging.INFO)
  try:
    _run()
  except UserError as error:
    flag_parsing.fail(error)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)
  except BrokenPipeError:  # whoever read our output has enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except OSError as error:
    if error.errno is None:
      raise
    where = error.filename or _DESTINATION.value or _WORKDIR.value
    flag_parsing.fail(f'{where}: {error.strerror}')  # a full disk, lost rights, …


def cli() -> None:
  app.run(main, flags_parser=flag_parsing.parse)


if __name__ == '__main__':
  cli()
