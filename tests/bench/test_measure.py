"""Arithmetic of benchmarks with a clock that the test turns: order, medians, ranges, ratios."""

import json
import os

import jax
import pytest

from aogpt_jax.bench import machine, measure, results
from aogpt_jax.bench.measure import Timing
from aogpt_jax.config import ModelConfig


class Clock:
  """Stands still but for what the runs take."""

  def __init__(self, monkeypatch):
    self.now, self.calls = 0.0, []
    monkeypatch.setattr(measure.time, 'perf_counter', lambda: self.now)
    monkeypatch.setattr(measure, 'REPEATS', 3)

  def run(self, name, *seconds):
    seconds = iter(seconds)

    def run():
      self.calls.append(name)
      self.now += next(seconds)
    return run


@pytest.fixture
def clock(monkeypatch):
  return Clock(monkeypatch)


def test_runs_take_turns_and_the_warm_up_is_apart(clock):
  times = measure.interleaved({'a': clock.run('a', 9, 1, 5, 3), 'b': clock.run('b', 8, 2, 2, 4)})
  assert clock.calls == ['a', 'b'] * 4
  assert times == {'a': Timing(9, [1, 5, 3]), 'b': Timing(8, [2, 2, 4])}
  assert (times['a'].median, times['a'].low, times['a'].high) == (3, 1, 5)


def test_without_a_warm_up_the_first_call_counts(clock):
  times = measure.interleaved({'a': clock.run('a', 9, 1, 5)}, warm_up=False)
  assert times == {'a': Timing(None, [9, 1, 5])}


def test_several_calls_are_one_run(clock):
  times = measure.interleaved({'a': clock.run('a', 9, 1, 3, 2, 2, 4, 6)}, calls=2)
  assert times['a'] == Timing(9, [2, 2, 5])


def test_a_long_run_is_timed_once_and_the_others_as_often_as_ever(clock, monkeypatch):
  """A warm-up that takes long compiles: it does not count."""
  monkeypatch.setattr(measure, 'LONG_SECONDS', 10.0)
  times = measure.interleaved({'long': clock.run('long', 12, 11),
                               'short': clock.run('short', 50, 1, 2, 3)})
  assert times == {'long': Timing(12, [11]), 'short': Timing(50, [1, 2, 3])}


def test_a_ratio_has_the_range_of_pairs_of_one_round():
  top, bottom = Timing(None, [4.0, 8.0, 6.0]), Timing(None, [2.0, 2.0, 3.0])
  assert measure.ratio(top, bottom) == measure.Ratio(3.0, 2.0, 4.0)
  assert measure.spread('x', measure.ratio(top, bottom)) == {'x': 3.0, 'x_low': 2.0, 'x_high': 4.0}
  once = Timing(None, [8.0])
  assert measure.ratio(once, Timing(None, [1.0, 4.0, 2.0])) == measure.Ratio(4.0, 2.0, 8.0)
  assert measure.spread('x', top) == {'x': 6.0, 'x_low': 4.0, 'x_high': 8.0}
  assert set(measure.spread('x', None).values()) == {None}


def test_the_slowest_run_has_the_lowest_rate():
  assert measure.rates(Timing(None, [4.0, 1.0, 2.0]), 8) == {
      'tokens_per_second': 4, 'tokens_per_second_low': 2, 'tokens_per_second_high': 8}


def test_the_peak_is_the_best_shape(monkeypatch):
  """With a clock that ticks once a call, the larger product has more FLOP/s: 2·rows·inner·cols."""
  ticks = iter(range(1000))
  monkeypatch.setattr(measure.time, 'perf_counter', lambda: next(ticks))
  monkeypatch.setattr(measure, 'SHAPES', ((2, 3, 4), (4, 8, 2)))
  assert measure.matmul_peak('float32') == measure.Peak(128, 'float32', (4, 8, 2))
  assert '4×8×2' in str(measure.matmul_peak('float32'))


def test_bfloat16_models_have_a_peak_of_their_own(monkeypatch):
  monkeypatch.setattr(measure, '_matmul_flops', lambda dtype, shape: len(dtype))
  peak, sentence = measure.model_peak(ModelConfig(dtype='bfloat16'))
  assert peak.dtype == 'bfloat16' and 'float32 matmul' in sentence
  assert 'bfloat16' not in measure.model_peak(ModelConfig())[1]


def test_flops_are_those_of_the_formula():
  model = ModelConfig(vocab_size=100, context_length=10, num_layers=2, num_heads=2, embed_dim=8)
  item = 2 * (2 * 12 * 8 * 8 + 8 * 100) + 4 * 2 * 10 * 8
  assert measure.forward_flops(model) == item
  peak = measure.Peak(3e3, 'float32', (1, 1, 1))
  row = measure.work(Timing(None, [2.0, 4.0, 9.0]), 6, item, peak)
  assert row == {'flops_per_token': item, 'flops_per_second': 6 * item / 4,
                 'share': pytest.approx(6 * item / 4 / 3e3)}


@pytest.mark.parametrize(('load', 'busy'), [((0.0, 9.0, 9.0), False), ((1e3, 0.0, 0.0), True),
                                            ((), False)])
def test_the_header_names_the_machine_and_warns_of_a_busy_one(load, busy, monkeypatch):
  monkeypatch.setenv('OMP_WAIT_POLICY', 'passive')
  peer = {'torch': '9.8', 'transformers': '7.6', 'threads': 5, 'device': 'cpu'}
  about = machine.describe(load, peer)
  text = machine.header(about)
  assert ('warning: the machine was busy' in text) == busy
  for part in (f'jax {jax.__version__}', 'torch 9.8', 'transformers 7.6', 'torch 5 on cpu',
               'OMP_WAIT_POLICY=passive', f'{about["cores"]} cores'):
    assert part in text, part
  assert about['cores'] == len(os.sched_getaffinity(0)) and json.dumps(about)
  assert 'torch' not in machine.header(machine.describe(load))


def test_tables_on_the_terminal_and_in_files_agree(tmp_path):
  """A range in the cell, – for what is not known, all digits in the JSON."""
  row = measure.timed('a', Timing(None, [0.12345, 0.1, 0.2])) | {'share': 0.4567}
  table = results.Table('T', ('name', 'seconds', 'first_seconds', 'share', 'runs'), [row], ('N',))
  lines = results.markdown(table).splitlines()
  assert lines[2] == '|  | seconds | first call, s | of the peak | timed runs |'
  assert lines[4] == '| a | 0.123 (0.1–0.2) | – | 45.7% | 3 |'
  results.write(tmp_path, 'x', [table], {'cpu': 'c'}, 'the header')
  page = (tmp_path / 'bench_x.md').read_text()
  assert results.markdown(table) in page and 'the header' in page
  found = json.loads((tmp_path / 'bench_x.json').read_text())
  assert (found['suite'], found['cpu'], found['notes']) == ('x', 'c', {'T': ['N']})
  assert found['results'] == [{'table': 'T'} | row]
  assert '0.12345' in (tmp_path / 'bench_x.csv').read_text()


def test_large_numbers_keep_their_digits():
  assert [results.number(x) for x in (12345.6, 99.96, 0.0012345)] == ['12,346', '100', '0.00123']
