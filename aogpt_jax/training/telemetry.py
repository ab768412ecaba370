"""Where the time of a run goes: MFU, seconds by activity, traces, kept compilations."""

import contextlib
import functools
import logging
import pathlib
import re
import time
from collections.abc import Iterator

import jax

from aogpt_jax.config import ModelConfig
from aogpt_jax.errors import UserError

log = logging.getLogger(__name__)

# Peak dense bf16 FLOP/s of one device, by the start of jax's device_kind; the first that fits.
# TPUs: the tables of docs.cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,v6e,tpu7x}, a chip each.
# NVIDIA: the data sheets of A100, H100, H200 and B200, "BFLOAT16 Tensor Core" without sparsity
# (their headline figures with sparsity are twice these).
PEAK_FLOPS = {
    'TPU v3': 123e12 / 2,  # jax counts a v3 core, half a chip
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,  # v5e
    'TPU v5e': 197e12,
    'TPU v5p': 459e12,
    'TPU v5': 459e12,
    'TPU v6 lite': 918e12,  # v6e, Trillium
    'TPU v6e': 918e12,
    'NVIDIA A100': 312e12,
    'NVIDIA H100 PCIe': 756e12,
    'NVIDIA H100': 989e12,
    'NVIDIA H200': 989e12,
    'NVIDIA GH200': 989e12,
    'NVIDIA B200': 2250e12,
}


def flops_per_token(config: ModelConfig) -> float:
  """Matmul FLOPs of forward and backward for one token: 6 a weight, 12·L·n·d for attention.

  The convention of PaLM (arXiv 2204.02311, appendix B), which counts the whole n×n score matrix.
  Tables (embeddings, modulation) are gathered, not multiplied, and not counted; nor is what remat
  computes a second time.
  """
  c = config
  weights = c.num_layers * 12 * c.embed_dim**2 + c.embed_dim * c.vocab_size
  return 6.0 * weights + 12.0 * c.num_layers * c.context_length * c.embed_dim


@functools.cache  # so that it is said once
def peak_flops() -> float | None:
  """Peak FLOP/s of all devices together, None for a kind that PEAK_FLOPS does not list."""
  kind = jax.devices()[0].device_kind
  for prefix, peak in PEAK_FLOPS.items():
    if kind.startswith(prefix):
      return peak * jax.device_count()
  log.info('MFU is not reported: the peak FLOP/s of %r is not in telemetry.PEAK_FLOPS', kind)
  return None


def mfu(tokens_per_second: float, config: ModelConfig) -> float | None:
  """Model FLOPs utilisation: tokens/s · `flops_per_token` / `peak_flops`; None if that is."""
  peak = peak_flops()
  return tokens_per_second * flops_per_token(config) / peak if peak else None


class Clock:
  """Adds up seconds by activity."""

  def __init__(self):
    self._seconds: dict[str, float] = {}

  @contextlib.contextmanager
  def measure(self, activity: str) -> Iterator[None]:
    """Counts the time within `with` as this activity's."""
    start = time.perf_counter()
    yield
    elapsed = time.perf_counter() - start
    self._seconds[activity] = self._seconds.get(activity, 0.0) + elapsed

  def take(self) -> dict[str, float]:
    """{'time/ACTIVITY_seconds': …} since the last call."""
    taken, self._seconds = self._seconds, {}
    return {f'time/{activity}_seconds': seconds for activity, seconds in taken.items()}


def parse_steps(text: str) -> tuple[int, int] | None:
  """'10:15' -> (10, 15); '' -> None.

  Raises:
    UserError: unless it is FIRST:LAST with 1 <= FIRST <= LAST.
  """
  if not text:
    return None
  match = re.fullmatch(r'(\d+):(\d+)', text)
  if not match or not 1 <= int(match[1]) <= int(match[2]):
    raise UserError(f'--profile_steps={text}: must be FIRST:LAST, the steps to trace, such as '
                    '10:15; they count from 1')
  return int(match[1]), int(match[2])


class Profiler:
  """Traces the steps FIRST to LAST of a run into a directory, for TensorBoard and XProf."""

  def __init__(self, steps: tuple[int, int] | None, directory: pathlib.Path):
    self._steps = steps
    self._directory = directory
    self._running = False

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Around everything that update `step` does; the trace starts and ends between two steps."""
    if not self._steps or not self._steps[0] <= step <= self._steps[1]:
      yield
      return
    if not self._running:  # a resumed run may come in between FIRST and LAST
      jax.profiler.start_trace(str(self._directory))
      self._running = True
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield
    if step == self._steps[1]:
      self.close()

  def close(self) -> None:
    """Writes the trace; a run that ends early keeps what it has."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
      log.info('profile: the trace is in %s', self._directory)


def cache_directory(setting: str, workdir: pathlib.Path) -> pathlib.Path | None:
  """Where config.train.compilation_cache says that compiled programs are kept; None: nowhere."""
  if setting == 'off':
    return None
  return pathlib.Path(setting).expanduser() if setting else workdir / 'compilation_cache'


@contextlib.contextmanager
def compilation_cache(setting: str, workdir: pathlib.Path) -> Iterator[None]:
  """Within `with`, XLA keeps what takes it over a second to compile, for the next start.

  Programs lie under a hash of themselves, the devices and the versions. A cache that the user
  chose for all of JAX (JAX_COMPILATION_CACHE_DIR) is left alone unless `setting` names another.

  Raises:
    UserError: if the directory cannot be made.
  """
  from jax.experimental.compilation_cache import compilation_cache as lib
  before = jax.config.jax_compilation_cache_dir
  directory = cache_directory(setting, workdir)
  if before and not setting:
    yield
    return
  try:
    if directory:
      directory.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f'train.compilation_cache={setting!r}: {directory} cannot be made: '
                    f'{error.strerror}') from None
  use = lambda path: (jax.config.update('jax_compilation_cache_dir', path), lib.reset_cache())
  use(str(directory) if directory else None)
  try:
    yield
  finally:
    use(before)
