"""Checkpoints: Orbax writes the arrays, a manifest of checksums written last makes them count.

    WORKDIR/checkpoints/STEP/{params,ema,optimizer}/…   Orbax
    WORKDIR/checkpoints/STEP/manifest.json              step, data state, sha256 of every file

A directory without a manifest is an unfinished save: it is never read, and the next save of that
step replaces it. Orbax itself does not notice flipped bytes.
"""

import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from aogpt_jax.errors import UserError
from aogpt_jax.training.step import TrainState

log = logging.getLogger(__name__)

MANIFEST = 'manifest.json'


def step_directory(directory: pathlib.Path, step: int) -> pathlib.Path:
  return directory / f'{step:08d}'


def finished_steps(directory: pathlib.Path) -> list[int]:
  """Steps whose save was finished, oldest first; [] for a directory that does not exist."""
  return sorted(int(path.parent.name) for path in directory.glob(f'*/{MANIFEST}')
                if path.parent.name.isdigit())


def _sha256(path: pathlib.Path) -> str:
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def _checksums(directory: pathlib.Path) -> dict[str, str]:
  return {str(path.relative_to(directory)): _sha256(path)
          for path in sorted(directory.rglob('*')) if path.is_file() and path.name != MANIFEST}


def read_manifest(directory: pathlib.Path, step: int) -> dict[str, Any]:
  """Returns the manifest of a finished step after comparing every checksum with the files.

  Raises:
    UserError: if the step is not there, or a file is missing, new or changed.
  """
  path = step_directory(directory, step)
  steps = finished_steps(directory)
  if step not in steps:
    raise UserError(f'{path}: no finished checkpoint of step {step}; there are {steps or "none"}')
  try:
    manifest = json.loads((path / MANIFEST).read_text())
    expected = dict(manifest['sha256'])
  except (ValueError, KeyError, TypeError):
    raise UserError(f'{path / MANIFEST}: damaged, not a manifest of a checkpoint; '
                    f'finished steps: {steps}') from None
  seen = _checksums(path)
  for name in expected | seen:
    if expected.get(name) != seen.get(name):
      what = ('is missing' if name not in seen else 'is not part of the checkpoint'
              if name not in expected else 'has changed since it was written')
      older = [s for s in steps if s < step]
      raise UserError(f'{path / name}: {what}, so this checkpoint is damaged; delete {path} to '
                      f'continue from ' + (f'step {older[-1]}' if older else 'the start'))
  return manifest


class CheckpointWriter:
  """Saves in the background, one save at a time, and keeps the last `keep` finished ones."""

  def __init__(self, directory: pathlib.Path, keep: int, data_state: dict[str, str]):
    self.directory = directory.resolve()  # Orbax wants absolute paths
    self._data_state = data_state
    self._keep = keep
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None

  def save(self, state: TrainState) -> None:
    """Starts saving `state`; returns once its arrays were copied off the devices.

    The manifest holds what continues the data: its fingerprints, and how many batches were read.

    Args:
      state: the training state; its buffers may be donated right after.

    Raises:
      UserError: if the previous save failed.
    """
    self.wait()
    step = int(state.step)
    path = step_directory(self.directory, step)
    if path.exists():
      shutil.rmtree(path)
    try:
      response = ocp.save_checkpointables_async(path, {
          'params': state.params, 'ema': state.ema,
          'optimizer': {'opt_state': state.opt_state, 'step': state.step}})
    except OSError as error:
      self._error = error
      return self.wait()
    self._thread = threading.Thread(target=self._finish, args=(response, path, step))
    self._thread.start()

  def _finish(self, response, path, step):
    try:
      response.result()
      if jax.process_index() == 0:
        manifest = {'step': step, 'batches_consumed': step, **self._data_state,
                    'sha256': _checksums(path)}
        temporary = path / (MANIFEST + '.tmp')
        temporary.write_text(json.dumps(manifest, indent=1))
        os.replace(temporary, path / MANIFEST)
        for old in finished_steps(self.directory)[:-self._keep]:
          shutil.rmtree(step_directory(self.directory, old))
    except Exception as error:  # handed to the main thread by wait()
      self._error = error

  def wait(self) -> None:
    """Blocks until the save under way, if any, is finished.

    Raises:
      UserError: if it failed (a full disk, a directory that vanished, …).
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      raise UserError(f'{self.directory}: saving a checkpoint failed: {error}; finished '
                      f'checkpoints: {finished_steps(self.directory) or "none"}') from error


def remove_unfinished(directory: pathlib.Path) -> None:
  """Deletes what killed saves left behind: STEP or STEP.orbax-… without a manifest."""
  for path in directory.glob('*'):
    if path.is_dir() and path.name.split('.')[0].isdigit() and not (path / MANIFEST).exists():
      log.info('removing unfinished checkpoint %s', path)
      shutil.rmtree(path)


def _load(directory: pathlib.Path, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
  path = step_directory(directory.resolve(), step)
  try:
    return ocp.load_checkpointables(path, abstract)
  except Exception as error:  # Orbax raises many kinds; the reason is in the cause
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    raise UserError(f'{path}: cannot be restored: {reason}') from error


def restore(directory: pathlib.Path, step: int, abstract: TrainState) -> TrainState:
  """Loads a whole state onto any mesh.

  Args:
    directory: WORKDIR/checkpoints.
    step: one of `finished_steps`, verified by `read_manifest`.
    abstract: TrainState of ShapeDtypeStructs with the shardings wanted.

  Raises:
    UserError: if arrays are missing or have other shapes.
  """
  loaded = _load(directory, step, {
      'params': abstract.params, 'ema': abstract.ema,
      'optimizer': {'opt_state': abstract.opt_state, 'step': abstract.step}})
  return TrainState(loaded['optimizer']['step'], loaded['params'], loaded['ema'],
                    loaded['optimizer']['opt_state'])


def restore_params(directory: pathlib.Path, step: int, abstract: Any, ema: bool) -> Any:
  """Loads the EMA or the raw weights alone; errors as `restore`."""
  name = 'ema' if ema else 'params'
  return _load(directory, step, {name: abstract})[name]
