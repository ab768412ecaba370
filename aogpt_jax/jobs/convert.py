"""--mode=convert: a PyTorch checkpoint of the reference to a run directory, and back."""

import dataclasses
import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp

from aogpt_jax import config as config_lib, interop, lm as lm_lib
from aogpt_jax.config import check
from aogpt_jax.data import tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.training import checkpoints, step as step_lib

log = logging.getLogger(__name__)


def run(source: pathlib.Path, destination: pathlib.Path, context_length: int | None = None,
        overwrite: bool = False, tokenizer: str = '') -> None:
  """Converts x.pt to a run directory, or a run (or RUN/checkpoints/STEP) to x.pt.

  Args:
    source, destination: one of them ends in .pt.
    context_length: x.pt to run: keeps the positions below it; None: all.
    overwrite: replaces an existing destination file; a directory is never deleted.
    tokenizer: x.pt to run: its name, as in the config's data.tokenizer; '': texts are ids.

  Raises:
    UserError: if it is not clear which way to convert, if the destination exists, and all that
      `interop.read_reference`, `interop.save_reference` and `lm.load` find.
  """
  source, destination = source.resolve(), destination.resolve()  # a link stays, its target counts
  from_file, to_file = (path.suffix.lower() == '.pt' for path in (source, destination))
  if from_file == to_file:
    raise UserError(f'--source={source} --destination={destination}: one of the two must be a .pt '
                    'file of the reference, the other a run directory')
  if not source.exists():
    raise UserError(f'--source={source}: does not exist')
  if to_file:
    check(context_length is None, '--context_length', context_length,
          'only a .pt file can be cropped while it is converted')
    check(not tokenizer, '--tokenizer', tokenizer, 'a .pt file has no place for it; leave it out')
    _check_file(destination, overwrite)
    _to_file(source, destination)
  else:
    _check_directory(destination)
    _to_run(source, destination, context_length, tokenizer)


def _check_file(path: pathlib.Path, overwrite: bool) -> None:
  if path.is_dir():
    raise UserError(f'--destination={path}: is a directory; choose the name of a new .pt file')
  if path.exists() and not overwrite:
    raise UserError(f'--destination={path}: exists; choose another name, or --overwrite it')


def _check_directory(path: pathlib.Path) -> None:
  if path.exists() and (not path.is_dir() or any(path.iterdir())):
    raise UserError(f'--destination={path}: exists and is not an empty directory; choose another '
                    'one, or delete it by hand')


def _to_run(source: pathlib.Path, destination: pathlib.Path, context_length: int | None,
            name: str) -> None:
  """Makes the run in a directory beside the destination and renames it: all of it or nothing."""
  reference = interop.read_reference(source, context_length)
  config, size = reference.config, reference.config.model.vocab_size
  tokenizer = tokenizers.IdsTokenizer(size)
  if name:
    tokenizer = tokenizers.make_for_vocabulary(name, size)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name))
  if reference.ema is None:
    log.info('%s has no averaged weights: the raw ones stand for them', source)
  unfinished = destination.with_name(f'{destination.name}.tmp-{os.getpid()}')
  try:
    unfinished.mkdir(parents=True)
    _write_checkpoint(reference, unfinished / 'checkpoints', tokenizer.fingerprint)
    (unfinished / 'config.json').write_text(config_lib.to_json(config))
    if name:
      tokenizer.save(unfinished / 'tokenizer.model')
    os.replace(unfinished, destination)
  except OSError as error:
    raise UserError(f'--destination={destination}: cannot be written: {error.strerror}') from None
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
  texts = f'tokenizer {name}' if name else 'its texts are ids, "3 17 4"'
  log.info('%s: step %d with a new optimiser state; %s', destination, reference.step, texts)


def _write_checkpoint(reference: interop.Reference, directory: pathlib.Path, fingerprint: str,
                      ) -> None:
  model = reference.config.model
  params = interop.params_from_reference(model, reference.raw)
  ema = (params if reference.ema is None
         else interop.params_from_reference(model, reference.ema))
  opt_state = jax.jit(step_lib.make_recipe(reference.config).optimizer.init)(params)
  writer = checkpoints.CheckpointWriter(
      directory, keep=1, data_state={'tokenizer_fingerprint': fingerprint})
  writer.save(step_lib.TrainState(jnp.int32(reference.step), params, ema, opt_state))
  writer.wait()


def _to_file(source: pathlib.Path, destination: pathlib.Path) -> None:
  raw, average = lm_lib.load(source, ema=False), lm_lib.load(source)
  interop.save_reference(raw.model, destination, average.model, raw.step,
                         raw.config.optimizer.ema_decay)
  log.info('%s: step %d of %s; tokenizer and optimiser state are not part of it', destination,
           raw.step, source)
