"""The command line: help, imports, and one clear line for every mistake."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = '--config=configs/quickstart.py'


def run(*args: str, devices: int = 1) -> subprocess.CompletedProcess:
  env = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
  return subprocess.run([sys.executable, '-m', 'aogpt_jax.main', *args], cwd=ROOT, env=env,
                        capture_output=True, text=True, timeout=120)


def test_help_is_instant_and_light():
  """--help imports no jax: it answers in well under the 2 s that importing jax may take."""
  start = time.perf_counter()
  result = run('--help')
  assert '--workdir' in result.stdout and '--mode' in result.stdout
  assert time.perf_counter() - start < 2
  code = ('import sys, aogpt_jax.main, aogpt_jax.config; '
          'print([m for m in ("jax", "flax", "optax", "orbax", "grain") if m in sys.modules])')
  light = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert light.stdout.strip() == '[]', light.stdout + light.stderr


def test_the_main_path_needs_neither_tensorflow_nor_torch():
  """Every module, the jobs and what is used of TFDS are imported; then neither is loaded."""
  code = '''
import sys
import aogpt_jax
for name in aogpt_jax.__all__:
  getattr(aogpt_jax, name)
from aogpt_jax.jobs import prepare, sample, train
import numpy as np, tensorflow_datasets as tfds
tfds.folder_dataset.write_metadata, tfds.features.Tensor(shape=(2,), dtype=np.int32)
print([m for m in ('tensorflow', 'torch') if m in sys.modules])
'''
  result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
  assert result.stdout.strip() == '[]', result.stdout + result.stderr


def write_bad_files(directory: pathlib.Path) -> None:
  (directory / 'empty.txt').touch()
  (directory / 'bad.txt').write_bytes(b'abc\xff')
  config = (ROOT / 'configs' / 'quickstart.py').read_text()
  (directory / 'typo.py').write_text(config.replace('model.num_layers', 'model.num_layer'))


@pytest.mark.parametrize(('args', 'message'), [
    ([QUICKSTART, '--config.model.num_layer=3'],
     '--config: no field "num_layer"; did you mean "num_layers"?'),
    (['--config={tmp}/typo.py'], '--config: no field "num_layer"; did you mean "num_layers"?'),
    (['--config=configs/quickstar.py'], "--config: [Errno 2] No such file or directory: "
     "'configs/quickstar.py'"),
    ([QUICKSTART, '--config.model.num_heads=5'],
     'model.num_heads=5: must divide model.embed_dim=128; the nearest that does is 4'),
    ([QUICKSTART, '--config.model.position_encoding=rotary'], 'did you mean "target_rotary"?'),
    ([QUICKSTART, '--config.model.vocab_size=300'],
     'model.vocab_size=300: must be at least the data.vocab_size=512 of the tokenizer'),
    ([QUICKSTART, '--config.data.train=files:{tmp}/none.txt'], 'no file matches "{tmp}/none.txt"'),
    ([QUICKSTART, '--config.data.train=files:{tmp}/empty.txt'],
     '{tmp}/empty.txt: the file is empty'),
    ([QUICKSTART, '--config.data.train=files:{tmp}/bad.txt'],
     '{tmp}/bad.txt: invalid UTF-8 at byte 3'),
    ([QUICKSTART, '--workdir=/proc/run'], '--workdir=/proc/run: cannot be written'),
    ([QUICKSTART, '--mode=sample'], '{tmp}/run/config.json does not exist'),
])
def test_a_mistake_is_one_line_and_exit_code_2(args, message, tmp_path):
  """No traceback, the field or file named, and no run started."""
  write_bad_files(tmp_path)
  fill = lambda text: text.replace('{tmp}', str(tmp_path))
  result = run(fill(args[0]), f'--workdir={tmp_path}/run', *map(fill, args[1:]))
  assert result.returncode == 2, result.stderr
  errors = [line for line in result.stderr.splitlines() if line.startswith('error: ')]
  assert len(errors) == 1 and fill(message) in errors[0], result.stderr
  assert 'Traceback' not in result.stderr
  assert not (tmp_path / 'run' / 'config.json').exists()


def test_a_bug_in_a_config_file_is_shown_whole(tmp_path):
  """It is no misspelt field: the author needs the line."""
  (tmp_path / 'bug.py').write_text('import math\n\n\ndef get_config():\n  return math.sqr(2)\n')
  result = run(f'--config={tmp_path}/bug.py', f'--workdir={tmp_path}/run')
  assert result.returncode != 0 and 'no field' not in result.stderr
  assert 'bug.py", line 5' in result.stderr and 'sqr' in result.stderr


def test_batch_not_divisible_by_the_devices(tmp_path):
  result = run(QUICKSTART, f'--workdir={tmp_path}', '--config.train.batch_size=30', devices=8)
  assert result.returncode == 2
  assert ('train.batch_size=30: rows are split over data×fsdp=8 devices, so it must be a multiple '
          'of 8; the nearest: 24 and 32') in result.stderr
  assert 'Traceback' not in result.stderr


def test_an_impossible_mesh(tmp_path):
  result = run(QUICKSTART, f'--workdir={tmp_path}', '--config.mesh.tensor=3', devices=8)
  assert result.returncode == 2
  assert 'there are 8 devices' in result.stderr and 'Traceback' not in result.stderr
