"""The training loop: batches in, state out, with reports, validation and checkpoints on the way."""

import json
import logging
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from aogpt_jax import distributed, sharding as sharding_lib
from aogpt_jax.config import Config
from aogpt_jax.data.loader import BatchIterator
from aogpt_jax.errors import UserError
from aogpt_jax.training import checkpoints, metrics, telemetry
from aogpt_jax.training.step import TrainState

log = logging.getLogger(__name__)


NONFINITE = 'nonfinite.json'


class Stopped(Exception):  # noqa: N818, it is no error
  """Leaves an evaluation that a stop request ends; training saves and ends as at any step."""


class StopRequest:
  """Within `with`, SIGTERM or Ctrl-C asks the run to save and end; a second Ctrl-C ends it now.

  One process that is asked is enough: `agreed` says so in all of them at the same call.
  """

  def __init__(self, mesh: jax.sharding.Mesh):
    """`mesh` holds the devices of all processes."""
    self._sharding = jax.sharding.NamedSharding(mesh, jax.P(mesh.axis_names))
    self._any = jax.jit(lambda x: x.max(), out_shardings=sharding_lib.replicated(mesh))
    self._asked: jax.Array | None = None
    self._agreed = False

  def __enter__(self) -> 'StopRequest':
    self.requested = False
    self._previous = {s: signal.signal(s, self._set) for s in (signal.SIGTERM, signal.SIGINT)}
    return self

  def _set(self, signum, frame):
    del frame
    if self.requested and signum == signal.SIGINT:
      raise KeyboardInterrupt
    self.requested = True
    log.warning('asked to stop; Ctrl-C again ends the run without saving')

  def agreed(self, also: bool = False) -> bool:
    """Whether to stop now; every process makes the same calls and gets the same answers.

    Several processes ask each other on their devices, behind the steps that are under way, and
    read the answer at the next call: so nobody waits.

    Args:
      also: another reason of this process to stop.
    """
    wanted = self.requested or also
    if jax.process_count() == 1 or self._agreed:
      self._agreed = self._agreed or wanted
      return self._agreed
    before = self._asked
    flag = np.array([wanted], np.int32)
    self._asked = self._any(jax.make_array_from_callback(
        (self._sharding.mesh.size,), self._sharding, lambda index: flag))
    self._agreed = before is not None and bool(before)
    return self._agreed

  def interrupts(self, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but a call raises Stopped once a stop is agreed upon."""
    def call(*args):
      if self.agreed():
        raise Stopped
      return function(*args)
    return call

  def __exit__(self, *unused) -> None:
    for signum, handler in self._previous.items():
      signal.signal(signum, handler)


class _Meter:
  """Turns device metrics into host scalars, one step late so that the device never waits.

  Every step's loss is looked at: a checkpoint is only written after the losses up to it were.
  """

  def __init__(self, config: Config, checkpoint_directory: Any,
               block_indices: Callable[[int], list[int]]):
    """block_indices: index of a global batch -> the blocks in it; named if its loss is bad."""
    self._config = config
    self._block_indices = block_indices
    self._directory = checkpoint_directory
    self._pending: tuple[int, dict[str, jax.Array]] | None = None
    self._since: tuple[int, float] | None = None
    self.scalars: dict[str, float] = {}

  def push(self, step: int, device_metrics: dict[str, jax.Array]) -> None:
    self.settle()
    self._pending = step, device_metrics

  def settle(self) -> None:
    """Waits for the metrics of the newest step; raises UserError if its loss is not finite."""
    if self._pending is None:
      return
    step, device_metrics = self._pending
    self._pending = None
    values = {name: float(value) for name, value in device_metrics.items()}
    if not all(np.isfinite(value) for value in values.values()):
      report = self._write_nonfinite(step, values)
      steps = checkpoints.finished_steps(self._directory)
      where = f'step {steps[-1]} in {self._directory}' if steps else 'none yet'
      raise UserError(
          f'step {step}: nats_per_token={values["nats_per_token"]}, '
          f'grad_norm={values["grad_norm"]}: the run stopped because they must be finite; the last '
          f'good checkpoint is kept ({where}); {report} names the batch; a lower '
          'optimizer.learning_rate or a longer optimizer.warmup_steps is the usual cure')
    self.scalars = {f'train/{name}': value for name, value in values.items()}
    self.scalars['train/perplexity'] = float(np.exp(values['nats_per_token']))

  def _write_nonfinite(self, step: int, values: dict[str, float]) -> pathlib.Path:
    """What is needed to look at the step again: its batch is a function of config and step."""
    path = self._directory.parent / NONFINITE
    if distributed.is_first():
      path.write_text(json.dumps({
          'step': step, 'metrics': {name: str(value) for name, value in values.items()},
          'block_indices': self._block_indices(step - 1)}) + '\n')
    return path

  def with_rates(self, step: int) -> dict[str, float]:
    """The newest scalars, with tokens/s and MFU since the last call."""
    now, c = time.perf_counter(), self._config
    scalars = dict(self.scalars)
    if self._since is not None and step > self._since[0]:
      tokens = (step - self._since[0]) * c.train.batch_size * c.model.context_length
      rate = tokens / (now - self._since[1])
      scalars['train/tokens_per_second'] = rate
      if (mfu := telemetry.mfu(rate, c.model)) is not None:
        scalars['train/mfu'] = mfu
    self._since = step, now
    return scalars

  def pause(self) -> None:
    """Leaves the time until the next report out of the rates (validation, a checkpoint)."""
    self._since = None


def _report_validation(step: int, scalars: dict[str, float], writer: metrics.MetricWriter,
                       progress: metrics.Progress) -> None:
  writer.write(step, scalars)
  progress.say(f'step {step}  ' + '  '.join(
      f'{name} {value:.2f}' for name, value in scalars.items() if 'perplexity' in name))


def _check_written(writer: metrics.MetricWriter) -> None:
  if writer.failure:
    raise UserError(writer.failure)


def fit(config: Config, state: TrainState, step_fn: Callable[..., Any],
        batches: BatchIterator, rows: np.ndarray, batch_sharding: jax.sharding.Sharding,
        writer: metrics.MetricWriter,
        saver: checkpoints.CheckpointWriter,
        validate: Callable[[Any], dict[str, float]], stop: StopRequest,
        profiler: telemetry.Profiler) -> TrainState:
  """Trains from `state.step` to config.train.num_steps, or until `stop` is requested.

  Args:
    config: of the run.
    state: where to start; its buffers are donated.
    step_fn: from `step.jit_step`.
    batches: yields this process's rows of each global batch, continuing at state.step.
    rows: the numbers of these rows, from `sharding.host_rows`.
    batch_sharding: of the global batch.
    writer, saver: where metrics and checkpoints go.
    validate: EMA params -> scalars by name; called every config.train.eval_every steps. May raise
      Stopped.
    stop: asked after every step.
    profiler: traces the steps it was made for.

  Returns:
    The last state. It has been saved.

  Raises:
    UserError: if a loss or gradient is not finite (nothing is saved then; the step and its blocks
      are written to nonfinite.json), or a save or the writing of metrics failed.
  """
  train, start = config.train, int(state.step)
  meter = _Meter(config, saver.directory, batches.block_indices)
  # A network file system may show other processes an older listing: process 0's counts.
  resumed = distributed.on_first(lambda: start in checkpoints.finished_steps(saver.directory))
  saved = start if resumed else None
  progress = metrics.Progress(train.num_steps, start)
  clock = telemetry.Clock()
  due = lambda step, every: every and step % every == 0
  step = start
  try:
    while step < train.num_steps and not stop.agreed(
        saver.failed or bool(writer.failure)):
      step += 1
      with profiler.step(step):
        with clock.measure('data_wait'):
          tokens = sharding_lib.global_array(next(batches), rows, batch_sharding,
                                             train.batch_size)
        with clock.measure('step'):  # push() waits for the step before this one
          state, device_metrics = step_fn(state, tokens)
          meter.push(step, device_metrics)
      progress.advance()
      if step % train.log_every == 0 or step == train.num_steps:
        with clock.measure('step'):
          meter.settle()
        scalars = meter.with_rates(step) | clock.take()
        writer.write(step, scalars)
        progress.report(step, train.num_steps, scalars)
      if due(step, train.checkpoint_every) and step < train.num_steps:
        with clock.measure('checkpoint'):
          meter.settle()
          saver.save(state)
        saved = step
        meter.pause()
      if due(step, train.eval_every) and step < train.num_steps:
        try:
          with clock.measure('eval'):
            meter.settle()
            scalars = validate(state.ema)
        except Stopped:
          break
        _report_validation(step, scalars, writer, progress)
        meter.pause()
    meter.settle()
    if saved != step:
      saver.save(state)
    saver.wait()
    distributed.together(lambda: _check_written(writer))
  finally:
    progress.close()
    profiler.close()
  if step < train.num_steps:
    log.info('asked to stop: step %d is saved in %s', step, saver.directory)
  return state
