"""What --mode=drill does to a run from within.

    python -m aogpt_jax.jobs.faults FAULT --config=…    and the other flags of main

The run is the real one; a fault makes happen, at a known step, what else comes by chance.
"""

import errno
import os
import pathlib
import resource
import signal
import sys
import threading
from collections.abc import Callable

from aogpt_jax import evaluation
from aogpt_jax.training import checkpoints, step as step_lib

STOP_STEP = 8  # where `stop` asks a run to end, between two checkpoints
SAVE_STEP = 6  # the checkpoint that is hit
NAN_STEP = 7
FILLER = 'filler'  # the file that fills a disk


def _before_save(action: Callable[[checkpoints.CheckpointWriter], None]) -> None:
  """Calls `action` before the save of SAVE_STEP, when the one before it is finished."""
  save = checkpoints.CheckpointWriter.save

  def patched(writer, state):
    if int(state.step) == SAVE_STEP:
      writer.wait()
      action(writer)
    save(writer, state)
  checkpoints.CheckpointWriter.save = patched


def _at_step(number: int, action: Callable[[step_lib.TrainState], step_lib.TrainState]) -> None:
  """Passes the state through `action` before update `number` = 1, 2, …."""
  jit_step = step_lib.jit_step

  def patched(*args):
    step_fn = jit_step(*args)

    def call(state, tokens):
      return step_fn(action(state) if int(state.step) == number - 1 else state, tokens)
    return call
  step_lib.jit_step = patched


def _terminate() -> None:
  os.kill(os.getpid(), signal.SIGTERM)


def stop() -> None:
  """SIGTERM before update STOP_STEP, as from a cluster that takes a machine back."""
  def action(state):
    _terminate()
    return state
  _at_step(STOP_STEP, action)


def kill_in_save() -> None:
  """SIGKILL once Orbax has begun to write the arrays of SAVE_STEP."""
  save = checkpoints.ocp.save_checkpointables_async

  def patched(path, *args, **kwargs):
    response = save(path, *args, **kwargs)
    while path.name == f'{SAVE_STEP:08d}':
      if any(p.is_file() for p in path.parent.glob(f'{path.name}.*/params/**/*')):
        os.kill(os.getpid(), signal.SIGKILL)
    return response
  checkpoints.ocp.save_checkpointables_async = patched


def fill_disk() -> None:
  """No byte is free on the disk of the run when SAVE_STEP is saved."""
  def action(writer):
    with open(pathlib.Path(writer.directory).parent / FILLER, 'wb', buffering=0) as file:
      try:
        while True:
          file.write(bytes(4096))
      except OSError as error:
        if error.errno != errno.ENOSPC:
          raise
  _before_save(action)


def limit_files() -> None:
  """No file may have a byte from SAVE_STEP on: a full disk for those who cannot mount one."""
  _before_save(lambda writer: resource.setrlimit(
      resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1])))


def nan() -> None:
  """The weights are NaN before update NAN_STEP."""
  import jax
  _at_step(NAN_STEP, lambda state: state._replace(
      params=jax.tree.map(lambda p: p * float('nan'), state.params)))


def stop_in_compile() -> None:
  """SIGTERM a moment after the first step began to compile."""
  def action(state):
    threading.Timer(0.2, _terminate).start()
    return state
  _at_step(1, action)


def stop_in_evaluation() -> None:
  """SIGTERM in the second batch of the first validation."""
  make = evaluation.make_block_nll

  def patched(*args):
    block_nll, calls = make(*args), []

    def call(*batch):
      calls.append(1)
      if len(calls) == 2:
        _terminate()
      return block_nll(*batch)
    return call
  evaluation.make_block_nll = patched


FAULTS = {f.__name__: f for f in (stop, kill_in_save, fill_disk, limit_files, nan, stop_in_compile,
                                  stop_in_evaluation)} | {'none': lambda: None}


if __name__ == '__main__':
  from aogpt_jax import main
  FAULTS[sys.argv.pop(1)]()
  main.cli()
