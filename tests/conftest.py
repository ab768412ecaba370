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


@pytest.fixture(scope='session')
def text_run(tmp_path_factory):
  """The directory of a tiny run, 30 steps on a few words; checkpoints of steps 20 and 30."""
  from aogpt_jax import config as config_lib  # here: the data tests do without jax
  from aogpt_jax.jobs import train
  directory = tmp_path_factory.mktemp('text_run')
  (directory / 'text.txt').write_text(
      'One two three four five six seven eight nine ten.\nOnce more!\n' * 40)
  config = config_lib.from_dict({
      'model': dict(vocab_size=320, context_length=16, num_layers=1, num_heads=2, embed_dim=16,
                    condition_dim=8, position_encoding='target_rotary'),
      'data': dict(train=f'files:{directory}/text.txt', validation=f'files:{directory}/text.txt',
                   vocab_size=290),
      'optimizer': dict(learning_rate=1e-2, warmup_steps=0, ema_decay=0.99),
      'train': dict(num_steps=30, batch_size=8, log_every=10, eval_every=0, checkpoint_every=20),
      'eval': dict(num_orders=2), 'sample': dict(num_samples=0)})
  train.run(config, directory / 'run')
  return directory / 'run'
