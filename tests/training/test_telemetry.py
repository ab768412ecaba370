"""MFU, the clock, traces, the cache of compiled programs, and what a run records of them."""

import json
import logging
import types

import jax
import jax.numpy as jnp
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import train as train_job
from aogpt_jax.training import telemetry


@pytest.fixture
def device(monkeypatch):
  """Makes jax report four devices of a kind."""
  def be(kind):
    telemetry.peak_flops.cache_clear()
    monkeypatch.setattr(jax, 'devices', lambda: [types.SimpleNamespace(device_kind=kind)] * 4)
    monkeypatch.setattr(jax, 'device_count', lambda: 4)
  yield be
  telemetry.peak_flops.cache_clear()


@pytest.mark.parametrize(('kind', 'peak'), [
    ('NVIDIA H200', 989e12), ('NVIDIA H100 80GB HBM3', 989e12), ('NVIDIA H100 PCIe', 756e12),
    ('NVIDIA A100-SXM4-80GB', 312e12), ('TPU v4', 275e12), ('TPU v5 lite', 197e12),
    ('TPU v5p', 459e12), ('TPU v5', 459e12), ('TPU v6 lite', 918e12)])
def test_mfu_is_model_flops_over_the_peak_of_all_devices(kind, peak, device):
  device(kind)
  model = config_lib.ModelConfig(vocab_size=100, context_length=10, num_layers=2, num_heads=2,
                                 embed_dim=8)
  a_token = 6 * (2 * 12 * 64 + 8 * 100) + 12 * 2 * 10 * 8
  assert telemetry.mfu(1e6, model) == pytest.approx(1e6 * a_token / (4 * peak))


def test_an_unknown_device_has_no_mfu_and_is_named_once(device, caplog):
  caplog.set_level(logging.INFO, logger='aogpt_jax')
  device('Abacus 9000')
  assert [telemetry.mfu(1e6, config_lib.ModelConfig()) for _ in range(3)] == [None] * 3
  (record,) = caplog.records
  assert "the peak FLOP/s of 'Abacus 9000' is not in" in record.message


def test_the_clock_adds_up_and_starts_anew(monkeypatch):
  ticks = iter([0.0, 1.0, 5.0, 7.0, 10.0, 13.0])
  monkeypatch.setattr(telemetry.time, 'perf_counter', lambda: next(ticks))
  clock = telemetry.Clock()
  for activity in ('step', 'eval', 'step'):
    with clock.measure(activity):
      pass
  assert clock.take() == {'time/step_seconds': 4.0, 'time/eval_seconds': 2.0}
  assert clock.take() == {}


@pytest.mark.parametrize('text', ['10', '15:10', '0:3', 'a:b', '1:2:3', '-1:4'])
def test_profile_steps_that_are_no_range(text):
  with pytest.raises(UserError, match=f'--profile_steps={text}: must be FIRST:LAST'):
    telemetry.parse_steps(text)
  assert telemetry.parse_steps('10:15') == (10, 15) and telemetry.parse_steps('') is None


def test_the_trace_starts_and_ends_with_its_steps(monkeypatch, tmp_path):
  """Also where a resumed run comes in between, and where a run ends early."""
  seen = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda path: seen.append('start'))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: seen.append('stop'))
  def run(first, last):
    seen.clear()
    profiler = telemetry.Profiler((3, 4), tmp_path)
    for step in range(first, last + 1):
      with profiler.step(step):
        seen.append(step)
    profiler.close()
    return list(seen)
  assert run(1, 6) == [1, 2, 'start', 3, 4, 'stop', 5, 6]
  assert run(4, 5) == ['start', 4, 'stop', 5]
  assert run(2, 3) == [2, 'start', 3, 'stop']
  assert run(5, 6) == [5, 6]


@pytest.fixture
def keep_all():
  """Programs that compile in no time are kept too."""
  name = 'jax_persistent_cache_min_compile_time_secs'
  before = getattr(jax.config, name)
  jax.config.update(name, 0)
  yield
  jax.config.update(name, before)


def test_a_second_start_finds_what_the_first_compiled(tmp_path, keep_all):
  hits = []
  listen = lambda event, **unused: hits.append(event) if event.endswith('cache_hits') else None
  jax.monitoring.register_event_listener(listen)
  try:
    for expected in (0, 1):
      jax.clear_caches()
      with telemetry.compilation_cache('', tmp_path):
        jax.jit(lambda x: jnp.sin(x) + 3)(1.0)
      assert len(hits) >= expected and bool(hits) == bool(expected)
  finally:
    jax.monitoring.unregister_event_listener(listen)
  assert any((tmp_path / 'compilation_cache').iterdir())
  assert jax.config.jax_compilation_cache_dir is None


def test_where_compiled_programs_are_kept(tmp_path):
  assert telemetry.cache_directory('off', tmp_path) is None
  assert telemetry.cache_directory('', tmp_path) == tmp_path / 'compilation_cache'
  assert telemetry.cache_directory(f'{tmp_path}/x', tmp_path / 'run') == tmp_path / 'x'
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=f"train.compilation_cache='{tmp_path}/file/x': .*cannot be"):
    with telemetry.compilation_cache(f'{tmp_path}/file/x', tmp_path):
      pass


def test_a_run_records_its_time_and_its_trace(tmp_path):
  """Seconds by activity at every record, a trace of two steps, a place for its programs."""
  text = tmp_path / 'text.txt'
  text.write_text('The quick brown fox jumps over the lazy dog.\n' * 40)
  config = config_lib.from_dict({
      'model': dict(vocab_size=300, context_length=8, num_layers=1, num_heads=2, embed_dim=16,
                    condition_dim=8),
      'data': dict(train=f'files:{text}', validation=f'files:{text}', tokenizer='bytes'),
      'train': dict(num_steps=6, batch_size=8, log_every=2, eval_every=3, checkpoint_every=3),
      'eval': dict(num_orders=2), 'sample': dict(num_samples=0)})
  run = tmp_path / 'run'
  train_job.run(config, run, profile_steps='2:3')
  records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  timed = [r for r in records if 'time/step_seconds' in r]
  assert [r['step'] for r in timed] == [2, 4, 6]
  assert all(r['time/data_wait_seconds'] > 0 and r['time/step_seconds'] > 0 for r in timed)
  assert [r['step'] for r in timed if 'time/eval_seconds' in r] == [4]
  assert [r['step'] for r in timed if 'time/checkpoint_seconds' in r] == [4]
  assert list((run / 'profile').rglob('*.xplane.pb'))
  assert (run / 'compilation_cache').is_dir()  # what took over a second to compile is in it
  assert jax.config.jax_compilation_cache_dir is None
