"""--dry_run: the numbers it prints, and that it needs neither data nor a directory."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import pytest

from aogpt_jax import config as config_lib, sharding
from aogpt_jax.config import MeshConfig
from aogpt_jax.jobs import dry_run
from aogpt_jax.training import plan, telemetry

ROOT = pathlib.Path(__file__).parents[2]

CONFIG = config_lib.from_dict({
    'model': dict(vocab_size=512, context_length=64, num_layers=5, num_heads=4, embed_dim=128,
                  condition_dim=16, loss_chunk=16, remat='dots'),
    'data': dict(train='files:/nowhere/*.txt', validation='openwebtext'),
    'train': dict(batch_size=32, accumulation=2), 'mesh': dict(data=1, fsdp=8)})


def test_it_prints_the_plan_without_data(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  dry_run.run(CONFIG)
  text = capsys.readouterr().out
  cell = lambda name: re.search(rf'^\| {name} \|(.*)\|$', text, re.MULTILINE)[1].split('|')
  number = lambda s: int(s.replace(',', ''))
  qkv = cell('blocks/attention/qkv/kernel')
  assert qkv[0].strip() == '5×128×3×4×32' and "P(None, 'fsdp', None, 'tensor', None)" in qkv[1]
  assert number(qkv[2]) == 4 * 5 * 128 * 3 * 128 == 8 * number(qkv[3])
  parameters = number(re.match(r'([\d,]+) parameters', text)[1])
  weights = [number(x) for x in cell('weights')[:2]]
  assert weights[0] == 4 * parameters and 7.5 < weights[0] / weights[1] < 8
  assert number(cell('state')[1]) == pytest.approx(4 * weights[1], rel=0.01)
  assert number(cell('all of it')[1]) > number(cell('activations and gradients')[1]) > 10**5
  assert not list(tmp_path.iterdir())


def test_the_two_counts_of_flops_agree():
  """XLA's differs by what the formula leaves out (tables, norms, softmax), and not by the loops."""
  formula = 32 * 64 * telemetry.flops_per_token(CONFIG.model)
  assert 1.0 < plan.counted_flops(CONFIG) / formula < 1.2


@pytest.mark.slow
def test_remat_lowers_the_memory_of_a_step():
  """none > dots > full. Without names on the linear layers, dots would be full."""
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  model = dataclasses.replace(CONFIG.model, num_layers=12, loss_chunk=0, vocab_size=64)
  memory = {}
  for remat in config_lib.REMAT:
    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(model, remat=remat),
        train=config_lib.TrainConfig(batch_size=32))
    memory[remat] = plan.plan_step(config, mesh).temporary_bytes
  assert memory['dots'] < memory['none'] / 2 and memory['full'] < memory['dots'] / 1.5


def _main(*args: str, devices: int = 8, timeout: int = 300) -> subprocess.CompletedProcess:
  env = os.environ | {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
  return subprocess.run([sys.executable, '-m', 'aogpt_jax.main', *args], cwd=ROOT, env=env,
                        capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_medium_on_eight_devices_in_a_minute():
  start = time.perf_counter()
  done = _main('--config=configs/medium.py', '--dry_run', '--config.mesh.data=1',
               '--config.mesh.fsdp=8')
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith('425,583,744 parameters')
  assert time.perf_counter() - start < 60


@pytest.mark.slow
def test_bench_of_compilation_and_memory():
  """The two ratios that the README states."""
  done = _main('--mode=bench', '--suite=compile', '--config=configs/medium.py', devices=1,
               timeout=1200)
  assert done.returncode == 0, done.stderr
  assert float(re.search(r'24 layers / 4 layers = ([\d.]+)', done.stdout)[1]) <= 1.5
  memory = {remat: float(gb) for remat, gb in
            re.findall(r'^\| auto \| (\w+) \| ([\d.]+) \|$', done.stdout, re.MULTILINE)}
  assert memory['dots'] < memory['none'] / 2 and memory['full'] < memory['dots'] / 2


def test_dry_run_belongs_to_train():
  done = _main('--config=configs/quickstart.py', '--mode=prepare', '--workdir=x', '--dry_run')
  assert done.returncode == 2
  assert 'error: --dry_run is not used by --mode=prepare; leave it out' in done.stderr
