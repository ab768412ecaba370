"""Timing in turn: warm-up apart, medians with their range, ratios of two sides of the same run."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aogpt_jax.config import ModelConfig
from aogpt_jax.training import telemetry

Row = dict[str, Any]

REPEATS = 5  # timed rounds
LONG_SECONDS = 30.0  # a run whose first timed call takes longer is timed once
# Matmuls (rows, inner, columns) whose best is the peak: a large square, and one layer's MLP.
SHAPES = ((2048, 2048, 2048), (4096, 384, 1536))
LARGE_SHAPE = (8192, 8192, 8192)  # on an accelerator, which the others do not fill


class Timing(NamedTuple):
  """Seconds of one run. first: of the untimed warm-up, compilation included; None without one."""

  first: float | None
  seconds: list[float]

  @property
  def median(self) -> float:
    return statistics.median(self.seconds)

  @property
  def low(self) -> float:
    return min(self.seconds)

  @property
  def high(self) -> float:
    return max(self.seconds)


class Ratio(NamedTuple):
  """A ratio of medians, and the least and the largest ratio within one round."""

  value: float
  low: float
  high: float


def calls_a_run() -> int:
  """How often a timed run calls: on an accelerator several, queued, as a training loop does."""
  return 1 if jax.default_backend() == 'cpu' else 20


def seconds_a_call(run: Callable[[], Any], calls: int = 1) -> float:
  """Times `calls` calls, queued one behind the other; waits for the last one's result."""
  start = time.perf_counter()
  for _ in range(calls):
    result = run()
  jax.block_until_ready(result)
  return (time.perf_counter() - start) / calls


def interleaved(runs: dict[str, Callable[[], Any]], warm_up: bool = True, calls: int = 1,
                ) -> dict[str, Timing]:
  """Times the runs in turn, REPEATS rounds: a, b, a, b, …

  Args:
    runs: by name; what they return is waited for.
    warm_up: call each once before, which compiles; its seconds are `Timing.first`.
    calls: calls in one timed run; its seconds are divided by them.

  Returns:
    A Timing a run. One whose first timed call took over LONG_SECONDS has that one alone.
  """
  first = {name: seconds_a_call(run) if warm_up else None for name, run in runs.items()}
  times = {name: [] for name in runs}
  for _ in range(REPEATS):
    for name, run in runs.items():
      if not (times[name] and times[name][0] > LONG_SECONDS):
        times[name].append(seconds_a_call(run, calls))
  return {name: Timing(first[name], times[name]) for name in runs}


def ratio(top: Timing, bottom: Timing) -> Ratio:
  """seconds of `top` / seconds of `bottom`.

  The range pairs what was timed in the same round, or, where one side was timed once, its extremes.
  """
  if len(top.seconds) == len(bottom.seconds):
    pairs = [a / b for a, b in zip(top.seconds, bottom.seconds)]
  else:
    pairs = [top.low / bottom.high, top.high / bottom.low]
  return Ratio(top.median / bottom.median, min(pairs), max(pairs))


def spread(name: str, value: Timing | Ratio | None) -> Row:
  """{name, name_low, name_high} of a Timing in seconds or of a Ratio; None: nothing is known."""
  middle = value.median if isinstance(value, Timing) else value and value.value
  return {name: middle, f'{name}_low': value and value.low, f'{name}_high': value and value.high}


def timed(name: str, timing: Timing) -> Row:
  """The fields that every timed row has; seconds."""
  return {'name': name, **spread('seconds', timing), 'runs': len(timing.seconds),
          'first_seconds': timing.first}


def rates(timing: Timing, tokens: int) -> Row:
  """Tokens a second; the range is that of the seconds."""
  return {'tokens_per_second': tokens / timing.median,
          'tokens_per_second_low': tokens / timing.high,
          'tokens_per_second_high': tokens / timing.low}


class Peak(NamedTuple):
  """The best of the machine's matmuls in jax: FLOP/s, dtype and shape."""

  flops: float
  dtype: str
  shape: tuple[int, int, int]

  def __str__(self) -> str:
    return (f'{self.dtype} matmul of {"×".join(map(str, self.shape))} in jax: '
            f'{self.flops / 1e9:,.1f} GFLOP/s')


def _matmul_flops(dtype: str, shape: tuple[int, int, int]) -> float:
  """FLOP/s of the best of REPEATS products; one device, jax's default precision."""
  rows, inner, columns = shape
  a, b = jnp.ones((rows, inner), dtype), jnp.ones((inner, columns), dtype)
  matmul = jax.jit(jnp.matmul)
  run = lambda: matmul(a, b)
  seconds_a_call(run)
  best = min(seconds_a_call(run, calls_a_run()) for _ in range(REPEATS))
  return 2 * rows * inner * columns / best


def matmul_peak(dtype: str) -> Peak:
  """What this machine reaches at most in a matmul of one dtype, the denominator of `share`."""
  shapes = SHAPES if jax.default_backend() == 'cpu' else (*SHAPES, LARGE_SHAPE)
  return max(Peak(_matmul_flops(dtype, shape), dtype, shape) for shape in shapes)


def model_peak(config: ModelConfig) -> tuple[Peak, str]:
  """The peak in model.dtype, and a sentence with it, and with float32's where that differs."""
  peaks = [matmul_peak(dtype) for dtype in dict.fromkeys((config.dtype, 'float32'))]
  return peaks[0], f'Peak, best of {REPEATS} for each of several shapes: ' + '; '.join(
      map(str, peaks)) + '.'


def forward_flops(config: ModelConfig) -> float:
  """Matmul FLOPs of the forward pass of one item: a third of `telemetry.flops_per_token`."""
  return telemetry.flops_per_token(config) / 3


def work(timing: Timing, tokens: int, flops_per_token: float, peak: Peak) -> Row:
  """FLOPs a token, FLOP/s reached and their share of the peak.

  Args:
    timing: of a run.
    tokens: that it deals with.
    flops_per_token: counted, see `telemetry.flops_per_token`.
    peak: of the machine.
  """
  reached = tokens * flops_per_token / timing.median
  return {'flops_per_token': flops_per_token, 'flops_per_second': reached,
          'share': reached / peak.flops}
