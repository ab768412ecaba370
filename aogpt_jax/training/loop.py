"""The training loop: batches in, state out, with reports, validation and checkpoints on the way."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from aogpt_jax import sharding as sharding_lib
from aogpt_jax.config import Config
from aogpt_jax.errors import UserError
from aogpt_jax.training import checkpoints, metrics, telemetry
from aogpt_jax.training.step import TrainState

log = logging.getLogger(__name__)


class StopRequest:
  """Within `with`, SIGTERM or Ctrl-C asks the run to save and end; a second Ctrl-C ends it now."""

  def __enter__(self) -> 'StopRequest':
    self.requested = False
    self._previous = {s: signal.signal(s, self._set) for s in (signal.SIGTERM, signal.SIGINT)}
    return self

  def _set(self, signum, frame):
    del frame
    if self.requested and signum == signal.SIGINT:
      raise KeyboardInterrupt
    self.requested = True
    log.info('asked to stop; Ctrl-C again ends the run without saving')

  def __exit__(self, *unused) -> None:
    for signum, handler in self._previous.items():
      signal.signal(signum, handler)


class _Meter:
  """Turns device metrics into host scalars, one step late so that the device never waits.

  Every step's loss is looked at: a checkpoint is only written after the losses up to it were.
  """

  def __init__(self, config: Config, checkpoint_directory: Any):
    self._config = config
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
      steps = checkpoints.finished_steps(self._directory)
      where = f'step {steps[-1]} in {self._directory}' if steps else 'none yet'
      raise UserError(
          f'step {step}: nats_per_token={values["nats_per_token"]}, '
          f'grad_norm={values["grad_norm"]}: the run stopped because they must be finite; the last '
          f'good checkpoint is kept ({where}); a lower optimizer.learning_rate or a longer '
          'optimizer.warmup_steps is the usual cure')
    self.scalars = {f'train/{name}': value for name, value in values.items()}
    self.scalars['train/perplexity'] = float(np.exp(values['nats_per_token']))

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


def fit(config: Config, state: TrainState, step_fn: Callable[..., Any], batches: Iterator,
        batch_sharding: jax.sharding.Sharding, writer: metrics.MetricWriter,
        saver: checkpoints.CheckpointWriter,
        validate: Callable[[Any], dict[str, float]], stop: StopRequest,
        profiler: telemetry.Profiler) -> TrainState:
  """Trains from `state.step` to config.train.num_steps, or until `stop` is requested.

  Args:
    config: of the run.
    state: where to start; its buffers are donated.
    step_fn: from `step.jit_step`.
    batches: yields this process's rows of each global batch, continuing at state.step.
    batch_sharding: of the global batch.
    writer, saver: where metrics and checkpoints go.
    validate: EMA params -> scalars by name; called every config.train.eval_every steps.
    stop: asked after every step.
    profiler: traces the steps it was made for.

  Returns:
    The last state. It has been saved.

  Raises:
    UserError: if a loss or gradient is not finite (nothing is saved then), or a save failed.
  """
  train, start = config.train, int(state.step)
  progress = metrics.Progress(train.num_steps, start)
  meter, clock = _Meter(config, saver.directory), telemetry.Clock()
  saved = start if start in checkpoints.finished_steps(saver.directory) else None
  due = lambda step, every: every and step % every == 0
  step = start
  try:
    while step < train.num_steps and not stop.requested:
      step += 1
      with profiler.step(step):
        with clock.measure('data_wait'):
          tokens = sharding_lib.global_array(next(batches), batch_sharding)
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
        with clock.measure('eval'):
          meter.settle()
          scalars = validate(state.ema)
        writer.write(step, scalars)
        progress.say(f'step {step}  ' + '  '.join(
            f'{name} {value:.2f}' for name, value in scalars.items() if 'perplexity' in name))
        meter.pause()
    meter.settle()
    if saved != step:
      saver.save(state)
    saver.wait()
  finally:
    progress.close()
    profiler.close()
  if stop.requested and step < train.num_steps:
    log.info('asked to stop: step %d is saved in %s', step, saver.directory)
  return state
