"""Eight virtual CPU devices for every test, and the golden values."""

import os
import pathlib

import numpy as np
import pytest

# Read when jax makes its backend. jax itself is not imported here: the data tests do without it.
# Most of the time goes into compiling tiny programs once: level 0 halves it.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = ' '.join(
    [os.environ.get('XLA_FLAGS', ''), '--xla_force_host_platform_device_count=8',
     '--xla_backend_optimization_level=0']).strip()

GOLDEN = pathlib.Path(__file__).parent / 'golden'


@pytest.fixture(scope='session')
def golden():
  """Loads tests/golden/NAME.npz as a dict of arrays."""
  def load(name):
    with np.load(GOLDEN / f'{name}.npz') as arrays:
      return dict(arrays)
  return load
