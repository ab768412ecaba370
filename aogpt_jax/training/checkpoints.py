"""Checkpoints: Orbax writes the arrays, a manifest of checksums written last makes them count.

    WORKDIR/checkpoints/STEP/{params,ema,optimizer}/…   Orbax
    WORKDIR/checkpoints/STEP/manifest.json              step, data state, sha256 of every file
    WORKDIR/checkpoints/newest                          the last step that got a manifest

A directory without a manifest is an unfinished save: it is never read, and the next save of that
step replaces it; unless `newest` names it, for then the manifest was lost. Orbax itself does not
notice flipped bytes. All processes write arrays; process 0 alone writes, and deletes, the rest.
"""

import errno
import hashlib
import json
import logging
import os
import pathlib
import shutil
import threading
from typing import Any, NoReturn

import jax
from orbax.checkpoint import v1 as ocp

from aogpt_jax import distributed
from aogpt_jax.errors import UserError
from aogpt_jax.training.step import TrainState

log = logging.getLogger(__name__)

MANIFEST = 'manifest.json'
NEWEST = 'newest'


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
  if step in _lost_manifest(directory):
    raise UserError(f'{path / MANIFEST}: is missing, so this checkpoint is damaged')
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
      raise UserError(f'{path / name}: {what}, so this checkpoint is damaged')
  return manifest


def _lost_manifest(directory: pathlib.Path) -> list[int]:
  """[the step that was finished last], if it is there but its manifest is not; else []."""
  try:
    step = int((directory / NEWEST).read_text())
  except (OSError, ValueError):  # no checkpoint yet, or those of before this file was written
    return []
  path = step_directory(directory, step)
  return [step] if path.exists() and not (path / MANIFEST).exists() else []


def saved_steps(directory: pathlib.Path) -> list[int]:
  """`finished_steps`, and the newest also where its manifest was lost since."""
  return sorted(finished_steps(directory) + _lost_manifest(directory))


def newest_sound(directory: pathlib.Path, allow_older: bool) -> dict[str, Any] | None:
  """What the manifest of the checkpoint to continue from says, None if there is none.

  Every file is compared with its checksum; these are left out of what is returned.

  Damaged checkpoints that are passed over are renamed to damaged-STEP: they are neither counted
  nor deleted later. What killed saves left behind is deleted. For one process alone.

  Args:
    directory: WORKDIR/checkpoints.
    allow_older: pass over damaged checkpoints.

  Raises:
    UserError: if the newest is damaged, and `allow_older` is not set or there is no older one.
  """
  steps = saved_steps(directory)
  manifest = None
  while steps and manifest is None:
    step = steps.pop()
    try:
      manifest = read_manifest(directory, step)
    except UserError as error:
      if not steps:
        raise UserError(f'{error}; there is no older one to continue from, --overwrite starts '
                        'anew') from None
      if not allow_older:
        raise UserError(f'{error}; --allow_older_checkpoint continues from step {steps[-1]}, if '
                        'that one is sound') from None
      log.warning('%s; going back to step %d', error, steps[-1])
      aside = directory / f'damaged-{step:08d}'
      shutil.rmtree(aside, ignore_errors=True)
      os.replace(step_directory(directory, step), aside)
  _remove_unfinished(directory)
  return manifest and {name: value for name, value in manifest.items() if name != 'sha256'}


class CheckpointWriter:
  """Saves in the background, one save at a time, and keeps the last `keep` finished ones."""

  def __init__(self, directory: pathlib.Path, keep: int, data_state: dict[str, str]):
    self.directory = directory.resolve()  # Orbax wants absolute paths
    self._data_state = data_state
    self._keep = keep
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None

  @property
  def failed(self) -> bool:
    """Whether this process knows that the save under way has failed; `wait` says why."""
    return self._error is not None

  def save(self, state: TrainState) -> None:
    """Starts saving `state`; returns once its arrays were copied off the devices.

    The manifest holds what continues the data: its fingerprints, and how many batches were read.

    Args:
      state: the training state; its buffers may be donated right after.

    Raises:
      UserError: if the previous save failed, or the disk has no room for this one.
    """
    self.wait()
    step = int(state.step)
    path = step_directory(self.directory, step)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    distributed.on_first(lambda: self._make_room(path, size))
    try:
      response = ocp.save_checkpointables_async(path, {
          'params': state.params, 'ema': state.ema,
          'optimizer': {'opt_state': state.opt_state, 'step': state.step}})
    except OSError as error:
      self._error = error  # `wait` raises it in all processes
      return
    self._thread = threading.Thread(target=self._finish, args=(response, path, step))
    self._thread.start()

  def _make_room(self, path: pathlib.Path, size: int) -> None:
    """Deletes an unfinished save; a disk that is full is better known before Orbax is at work."""
    if path.exists():
      shutil.rmtree(path)
    self.directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(self.directory).free
    if free < size:
      self._fail(OSError(f'{os.strerror(errno.ENOSPC)}: it has {size:,} bytes, and {free:,} are '
                         'free'))

  def _fail(self, error: Exception) -> NoReturn:
    raise UserError(f'{self.directory}: saving a checkpoint failed: {_reason(error)}; finished '
                    f'checkpoints: {finished_steps(self.directory) or "none"}') from error

  def _finish(self, response, path, step):
    try:
      response.result()
      if distributed.is_first():  # Orbax is done once all processes are
        manifest = {'step': step, 'batches_consumed': step, **self._data_state,
                    'sha256': _checksums(path)}
        _replace(path / MANIFEST, json.dumps(manifest, indent=1))
        _replace(self.directory / NEWEST, f'{step}\n')
        for old in finished_steps(self.directory)[:-self._keep]:
          shutil.rmtree(step_directory(self.directory, old))
    except Exception as error:  # handed to the main thread by wait()
      self._error = error
      if distributed.is_first():  # a full disk has better uses for it
        for left in self.directory.glob(f'{path.name}*'):
          if not (left / MANIFEST).exists():
            shutil.rmtree(left, ignore_errors=True)

  def wait(self) -> None:
    """Blocks until the save under way, if any, is finished in all processes.

    Raises:
      UserError: if it failed in one of them (a full disk, a directory that vanished, …).
    """
    distributed.together(self._join)

  def _join(self) -> None:
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      self._fail(error)


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file so that a kill leaves the old one or the new one."""
  unfinished = path.with_name(path.name + '.tmp')
  unfinished.write_text(text)
  os.replace(unfinished, path)


def _reason(error: BaseException) -> str:
  """What went wrong below Orbax' layers, without its addresses and stack traces."""
  while error.__cause__ is not None:
    error = error.__cause__
  words = ' '.join(str(error).split()) or type(error).__name__
  return words if len(words) <= 300 else f'{words[:300]}…'


def _remove_unfinished(directory: pathlib.Path) -> None:
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
