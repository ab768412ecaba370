"""What the numbers of a benchmark were measured on."""

import os
import pathlib
import platform
import re
from typing import Any

import jax
import jaxlib

from aogpt_jax.data import workers

BUSY = 0.25  # load average a core from which a measurement is not to be trusted
VARIABLES = ('XLA_FLAGS', 'NPROC', 'OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'MKL_NUM_THREADS')


def _cpu() -> str:
  path = pathlib.Path('/proc/cpuinfo')  # Linux; elsewhere platform knows
  found = re.search(r'^model name\s*:\s*(.+)$', path.read_text(), re.M) if path.exists() else None
  return found[1] if found else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
  try:
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (ValueError, OSError, AttributeError):
    return None


def jax_threads() -> int:
  """Threads of XLA's pool on a CPU: one a core that this process may use, or $NPROC."""
  return int(os.environ.get('NPROC') or workers.count_cores())


def load() -> tuple[float, ...]:
  """Load averages of 1, 5 and 15 minutes; () where the system has none."""
  return os.getloadavg() if hasattr(os, 'getloadavg') else ()


def describe(load_at_start: tuple[float, ...], peer: dict[str, Any] | None = None,
             ) -> dict[str, Any]:
  """The machine, the versions and the threads, as plain values.

  Args:
    load_at_start: from `load`, before anything was imported or run.
    peer: versions and threads of the other side, from `peers.describe`; None without one.
  """
  device = jax.devices()[0]
  return {'cpu': _cpu(), 'cores': workers.count_cores(), 'memory_bytes': _memory_bytes(),
          'device': device.device_kind, 'platform': device.platform,
          'num_devices': jax.device_count(), 'os': platform.platform(),
          'python': platform.python_version(), 'jax': jax.__version__,
          'jaxlib': jaxlib.__version__,
          'environment': {name: os.environ[name] for name in VARIABLES if name in os.environ},
          'jax_threads': jax_threads(), 'load_at_start': list(load_at_start), 'peer': peer}


def header(about: dict[str, Any]) -> str:
  """`describe` as lines of text, the last one a warning if the machine was busy."""
  memory = f', {about["memory_bytes"] / 1e9:.1f} GB' if about['memory_bytes'] else ''
  versions = [f'Python {about["python"]}', f'jax {about["jax"]}', f'jaxlib {about["jaxlib"]}']
  threads = [f'jax {about["jax_threads"]} (XLA\'s pool)']
  if about['peer']:
    versions += [f'{name} {about["peer"][name]}' for name in ('torch', 'transformers')]
    threads.append(f'torch {about["peer"]["threads"]} on {about["peer"]["device"]}')
  first = about['load_at_start'][:1]
  lines = [f'{about["cpu"]}, {about["cores"]} cores{memory}; {about["platform"]} '
           f'{about["device"]}, one device of {about["num_devices"]} used',
           f'{about["os"]}; {", ".join(versions)}',
           f'threads: {", ".join(threads)}; load average at the start: '
           + (f'{first[0]:.2f}' if first else 'unknown')]
  if about['environment']:
    lines.append(', '.join(f'{name}={value}' for name, value in about['environment'].items()))
  if first and first[0] > BUSY * about['cores']:
    lines.append(f'warning: the machine was busy in the minute before (load {first[0]:.2f} on '
                 f'{about["cores"]} cores): these times are not to be trusted'
                 + ', and PyTorch, whose threads wait for each other actively, suffers most'
                 * bool(about['peer']))
  return '  \n'.join(lines)
