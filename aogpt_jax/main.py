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

from aogpt_jax import cli_flags, config as config_lib, distributed, flag_parsing
from aogpt_jax.errors import UserError

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(cli_flags)  # so that --help shows them


def _config_values() -> dict[str, Any]:
  """The ConfigDict as a dict; a config file that cannot be read shows up here, not in parsing."""
  try:
    return dict(FLAGS.config)
  except OSError as error:  # several lines about the places that were tried
    raise UserError(f'--config: {str(error).splitlines()[-1]}') from None


def _path(text: str) -> pathlib.Path:
  return pathlib.Path(os.path.expanduser(text)).absolute()


def _run() -> None:
  mode = FLAGS.mode
  allowed = cli_flags.MODE_FLAGS[mode]
  alone = FLAGS.dry_run or FLAGS.suite != 'samplers' or (mode == 'score' and FLAGS.source)
  needed = allowed[:1] if alone else allowed[:2]
  flag_parsing.check_given(mode, needed, {f for fs in cli_flags.MODE_FLAGS.values() for f in fs} -
                           set(allowed))
  distributed.start(FLAGS.distributed, FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
  if mode == 'drill':
    job = importlib.import_module('aogpt_jax.jobs.drill')
    return job.run(_path(FLAGS.workdir))
  if mode == 'convert':
    job = importlib.import_module('aogpt_jax.jobs.convert')
    return job.run(_path(FLAGS.source), _path(FLAGS.destination), FLAGS.context_length,
                   FLAGS.overwrite, FLAGS.tokenizer or '')
  values = _config_values()
  if FLAGS.sampler is not None:
    values['sample'] = dict(values['sample']) | {'sampler': FLAGS.sampler}
  config = config_lib.from_dict(values)
  workdir = _path(FLAGS.workdir or '.')
  job = importlib.import_module(f'aogpt_jax.jobs.{"dry_run" if FLAGS.dry_run else mode}')
  if FLAGS.dry_run:
    return job.run(config)
  if mode == 'train':
    return job.run(config, workdir, FLAGS.overwrite, FLAGS.allow_older_checkpoint,
                   FLAGS.profile_steps or '')
  if mode == 'bench':
    return job.run(config, workdir, FLAGS.suite, FLAGS.peer,
                   _path(FLAGS.output) if FLAGS.output else None)
  source = _path(FLAGS.source) if FLAGS.source else workdir
  orders = FLAGS.order or []
  if mode == 'evaluate':
    output = _path(FLAGS.output) if FLAGS.output else workdir / 'evaluation'
    return job.run(config, workdir, source, FLAGS.corpus, orders, FLAGS.judge or '', output,
                   FLAGS.tokenizer or '')
  if mode == 'prepare':
    return job.run(config, workdir)
  from aogpt_jax.jobs import outputs
  destination = outputs.Destination(FLAGS.output or '', FLAGS.html or '')
  destination.check(FLAGS.input)
  if mode == 'score':
    config_lib.check(len(orders) <= 1, '--order', orders, 'only one is used by --mode=score')
    return job.run(config, source, destination.output, FLAGS.text, FLAGS.input,
                   *(orders or ['left_to_right']), FLAGS.tokenizer or '')
  if mode == 'infill':
    return job.run(config, workdir, destination, FLAGS.text, FLAGS.input)
  return job.run(config, workdir, destination)


@distributed.ending_together()
def main(argv: list[str]) -> None:
  """Validates the config, then runs one job; a user's mistake ends in one line and exit code 2."""
  if len(argv) > 1:
    flag_parsing.fail(f'unexpected arguments {argv[1:]}; a value with spaces needs quotes')
  # Orbax and TFDS report every file through absl; ours are the lines a person wants.
  absl_logging.set_verbosity(absl_logging.WARNING)
  # Its errors reach us as exceptions, too; ours is the one line that says what they mean.
  absl_logging.get_absl_logger().addFilter(
      lambda record: not ('orbax' in record.pathname and record.exc_info))
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
    where = error.filename or FLAGS.destination or FLAGS.workdir
    flag_parsing.fail(f'{where}: {error.strerror}')  # a full disk, lost rights, …


def cli() -> None:
  app.run(main, flags_parser=flag_parsing.parse)


if __name__ == '__main__':
  cli()
