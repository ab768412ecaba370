"""Several processes: one run, the same numbers, and nobody waits for one that failed."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import pytest

from aogpt_jax import config as config_lib, distributed, sharding as sharding_lib
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import evaluate, train as train_job
from aogpt_jax.training import checkpoints

ROOT = pathlib.Path(__file__).parents[1]
CONFIG_FILE = '''
import dataclasses
import pathlib
import ml_collections
from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.from_json((pathlib.Path(__file__).parent / 'config.json').read_text())
  return ml_collections.ConfigDict(dataclasses.asdict(config))
'''
TEXT = 'The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n'


def start(arguments: list[str], count: int = 2, devices: int = 1) -> list[subprocess.Popen]:
  """Starts python with `arguments` and the flags of each process."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  env = os.environ | {'PYTHONPATH': str(ROOT), 'XLA_FLAGS': (
      f'--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0')}
  return [subprocess.Popen(
      [sys.executable, *arguments, f'--coordinator=127.0.0.1:{port}', f'--num_processes={count}',
       f'--process_id={i}'], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
      for i in range(count)]


def finish(processes: list[subprocess.Popen], timeout: float = 200) -> list[tuple[int, str, str]]:
  """(exit code, stdout, stderr) of each; none is left running."""
  try:
    outputs = [p.communicate(timeout=timeout) for p in processes]
    return [(p.returncode, *output) for p, output in zip(processes, outputs)]
  finally:
    for p in processes:
      p.kill()


def write_run(directory: pathlib.Path, **sections) -> tuple[config_lib.Config, list[str]]:
  """A tiny config as a file; returns it with the arguments that train it in directory/run."""
  directory.mkdir(exist_ok=True)
  text = directory / 'text.txt'
  text.write_text(TEXT * 10)
  values = {
      'model': dict(vocab_size=300, context_length=8, num_layers=1, num_heads=2, embed_dim=16,
                    condition_dim=8, position_encoding='target_rotary'),
      'data': dict(train=f'files:{text}', validation=f'files:{text}', vocab_size=290),
      'optimizer': dict(learning_rate=1e-2, warmup_steps=2, ema_decay=0.9, decay_steps=50),
      'train': dict(num_steps=10, batch_size=16, log_every=1, eval_every=0, checkpoint_every=0),
      'eval': dict(num_orders=2, batch_size=32), 'sample': dict(num_samples=0),
      'mesh': dict(data=1, fsdp=-1)}
  for name, changes in sections.items():
    values[name] = values[name] | changes
  config = config_lib.from_dict(values)
  (directory / 'config.json').write_text(config_lib.to_json(config))
  (directory / 'config.py').write_text(CONFIG_FILE)
  return config, ['-m', 'aogpt_jax.main', f'--config={directory}/config.py',
                  f'--workdir={directory}/run']


def losses(workdir: pathlib.Path) -> list[float]:
  records = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  steps = [r for r in records if 'train/nats_per_token' in r]
  assert [r['step'] for r in steps] == list(range(1, len(steps) + 1))
  return [r['train/nats_per_token'] for r in steps]


@pytest.fixture
def one_device(monkeypatch):
  """For the runs of the tests' own process, which has eight."""
  make_mesh = sharding_lib.make_mesh
  monkeypatch.setattr(sharding_lib, 'make_mesh', lambda _: make_mesh(
      sharding_lib.MeshConfig(), jax.devices()[:1]))


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, one_device):
  """Weights divided over both: losses and validation as in one process with one device.

  The blocks do not divide by the evaluation batch, and the second process writes and prints
  nothing.
  """
  config, arguments = write_run(tmp_path / 'two')
  (code, out, err), (code2, out2, err2) = finish(start(arguments))
  assert (code, code2) == (0, 0), err + err2
  assert '| uniform |' in out and 'Everything lies in' in out
  ours = [line for line in out2.splitlines() if not line.startswith('[Gloo]')]  # C++ code of jax
  assert not ours and 'step 1/10' in err and 'step 1' not in err2
  train_job.run(config, tmp_path / 'one')
  assert losses(tmp_path / 'two/run') == pytest.approx(losses(tmp_path / 'one'), abs=1e-5)
  one, two = (json.loads((path / 'evaluation.json').read_text())
              for path in (tmp_path / 'one', tmp_path / 'two/run'))
  for want, got in zip(one['estimates'], two['estimates'], strict=True):
    assert got['nats_per_token'] == pytest.approx(want['nats_per_token'], abs=1e-5)
    assert got['num_blocks'] == want['num_blocks'] and want['num_blocks'] % 32


@pytest.mark.slow
def test_two_processes_evaluate_and_sample(tmp_path, one_device):
  """--mode=evaluate in two processes prints what it prints in one; training ends with a text."""
  config, arguments = write_run(tmp_path / 'two', train=dict(num_steps=2),
                                sample=dict(num_samples=1), eval=dict(num_ensembles=2))
  (code, out, err), (code2, _, err2) = finish(start(arguments))
  assert (code, code2) == (0, 0), err + err2
  assert '--- 1\n' in out
  (code, out, err), (code2, _, err2) = finish(start([*arguments, '--mode=evaluate']))
  assert (code, code2) == (0, 0), err + err2
  evaluate.run(config, tmp_path / 'two/run', output=tmp_path / 'one')
  one, two = (json.loads((path / 'perplexity.json').read_text())['results']
              for path in (tmp_path / 'one', tmp_path / 'two/run/evaluation'))
  assert len(one) == 4
  for want, got in zip(one, two, strict=True):
    assert got['nats_per_token'] == pytest.approx(want['nats_per_token'], abs=1e-5)


def test_sigterm_to_one_stops_both_and_one_process_goes_on(tmp_path, one_device, monkeypatch):
  """Both save the same step and exit with 0; one process with one device continues the run."""
  config, arguments = write_run(tmp_path / 'two', train=dict(num_steps=100_000))
  workdir, processes = tmp_path / 'two/run', start(arguments)
  metrics = workdir / 'metrics.jsonl'
  end = time.monotonic() + 120
  while time.monotonic() < end and not (metrics.exists()
                                        and metrics.read_text().count('\n') >= 3):
    time.sleep(0.1)
  processes[1].send_signal(signal.SIGTERM)  # not the one that writes
  (code, _, err), (code2, _, err2) = finish(processes)
  assert (code, code2) == (0, 0), err + err2
  (step,) = checkpoints.finished_steps(workdir / 'checkpoints')
  assert 3 <= step == len(losses(workdir)) < 100_000
  assert f'step {step} is saved' in err
  monkeypatch.setattr(train_job, '_finish', lambda *args: None)  # its evaluation is not the matter
  monkeypatch.setattr(train_job, '_show', lambda *args: None)
  longer = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=step + 3))
  train_job.run(longer, workdir)
  train_job.run(longer, tmp_path / 'whole')
  assert losses(workdir) == pytest.approx(losses(tmp_path / 'whole'), abs=1e-5)


CHECKS = '''
import json, pathlib, sys
import jax, numpy as np
from aogpt_jax import distributed, sharding
from aogpt_jax.config import MeshConfig
from aogpt_jax.errors import UserError
from aogpt_jax.training import loop

flags = dict(a[2:].split('=') for a in sys.argv[1:] if a.startswith('--'))
shared = pathlib.Path(sys.argv[1])
distributed.start(False, flags['coordinator'], 2, int(flags['process_id']))
me = jax.process_index()
seen = {}


def fails(function):
  try:
    function()
  except UserError as error:
    return str(error)


def fail_on(process):
  if me == process:
    raise UserError('a reason')


values = np.arange(8 * 3).reshape(8, 3)
for sizes in ((4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)):
  placed = sharding.batch_sharding(sharding.make_mesh(MeshConfig(*sizes)))
  rows = sharding.host_rows(placed, 8)
  array = sharding.global_array(values[rows], rows, placed, 8)
  for shard in array.addressable_shards:
    np.testing.assert_array_equal(shard.data, values[shard.index])
  seen['rows %d %d %d' % sizes] = rows.tolist()
# A mesh that deals out devices in another order than processes.
mixed = jax.sharding.Mesh(np.array(jax.devices())[[0, 2, 1, 3]].reshape(4, 1, 1), sharding.AXES)
placed = sharding.batch_sharding(mixed)
rows = sharding.host_rows(placed, 8)
array = sharding.global_array(values[rows], rows, placed, 8)
for shard in array.addressable_shards:
  np.testing.assert_array_equal(shard.data, values[shard.index])
seen['mixed'] = rows.tolist()

stop, answers = loop.StopRequest(mixed), []
with stop:
  for step in range(6):
    stop.requested |= me == 1 and step == 2
    answers.append(stop.agreed())
seen['stops'] = answers
seen['first'] = distributed.on_first(lambda: {'process': me})
seen['fails'] = [fails(lambda: distributed.together(lambda: fail_on(p))) for p in (0, 1)]
seen['first fails'] = fails(lambda: distributed.on_first(lambda: fail_on(0)))
order = []
distributed.first_then_rest(lambda: (shared / f'made{me}').touch() or order.extend(
    sorted(p.name for p in shared.glob('made*'))))
seen['order'] = order
seen['same'] = fails(lambda: distributed.check_same('x', 'same'))
seen['different'] = fails(lambda: distributed.check_same('x', str(me)))
seen['shared'] = fails(lambda: distributed.check_shared(shared, '--workdir'))
(shared / f'own{me}').mkdir()
seen['not shared'] = fails(lambda: distributed.check_shared(shared / f'own{me}', '--workdir'))
print(json.dumps(seen), file=sys.__stdout__, flush=True)
with distributed.ending_together():  # one fails where the other waits for it
  distributed.GOODBYE_SECONDS = 1
  if me == 1:
    sys.exit(2)
  distributed.gather('')
'''


def test_agreement_between_two_processes(tmp_path):
  """Rows of each, stops, failures and files, in one start of two processes with two devices."""
  script = tmp_path / 'checks.py'
  script.write_text(CHECKS)
  processes = start([str(script), str(tmp_path)], devices=2)
  processes[1].wait(200)  # JAX alone would wait for 300 s at its exit
  processes[0].kill()  # it notices by a heartbeat, after 100 s
  results = finish(processes)
  assert results[1][0] == 2, results[1]
  zero, one = (json.loads(out.splitlines()[-1]) for _, out, _ in results)
  low, high, whole = [0, 1, 2, 3], [4, 5, 6, 7], list(range(8))
  for sizes, rows in {'4 1 1': (low, high), '1 4 1': (low, high), '2 1 2': (low, high),
                      '1 2 2': (low, high), '1 1 4': (whole, whole)}.items():
    assert (zero[f'rows {sizes}'], one[f'rows {sizes}']) == rows, sizes
  assert (zero['mixed'], one['mixed']) == ([0, 1, 4, 5], [2, 3, 6, 7])
  assert zero['stops'] == one['stops'] == [False] * 3 + [True] * 3
  assert zero['first'] == one['first'] == {'process': 0}
  assert zero['fails'] == ['a reason', 'process 1 failed: a reason']
  assert one['fails'] == ['process 0 failed: a reason', 'a reason']
  assert (zero['first fails'], one['first fails']) == ('a reason', 'process 0 failed: a reason')
  assert (zero['order'], one['order']) == (['made0'], ['made0', 'made1'])
  for seen in (zero, one):
    assert seen['same'] is None and seen['shared'] is None
    assert seen['different'] == 'x: not the same in process 1 as in process 0'
    assert 'process 1 does not see what process 0 writes there' in seen['not shared']


@pytest.mark.parametrize(('flags', 'line'), [
  ((False, 'a:1', None, None), '--num_processes, --process_id is missing: .* go together'),
  ((False, None, None, 0), '--coordinator, --num_processes is missing'),
  ((False, 'host', 2, 0), '--coordinator=host: must be HOST:PORT'),
  ((False, 'host:0', 2, 0), '--coordinator=host:0: must be HOST:PORT'),
  ((False, 'host:1', 2, 2), r'--process_id=2: must be in \[0, --num_processes=2\)'),
  ((True, 'host:1', None, 0), '--distributed finds .* leave out --coordinator, --process_id'),
])
def test_flags_that_do_not_go_together(flags, line):
  with pytest.raises(UserError, match=line):
    distributed.start(*flags)


def test_no_cluster_is_one_line():
  code = ('from aogpt_jax import distributed, errors\n'
          'try:\n  distributed.start(True, None, None, None)\n'
          'except errors.UserError as error:\n  print(error)')
  clusters = re.compile('SLURM|OMPI|TPU|KUBERNETES|JAX_COORDINATOR')
  env = {name: value for name, value in os.environ.items() if not clusters.match(name)}
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, capture_output=True,
                        text=True, timeout=120)
  assert done.stdout.startswith('--distributed: this is no cluster that JAX knows'), done.stderr
  assert done.stdout.count('\n') == 1


def test_without_flags_there_is_one_process():
  distributed.start(False, None, None, None)
  assert distributed.is_first() and distributed.gather('x') == ['x']
  assert distributed.on_first(lambda: [1]) == [1]
