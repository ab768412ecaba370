"""Suites with times that the test chooses: every ratio is that of the two rows beside it."""

import dataclasses
import json
import pathlib
import sys

import pytest

from aogpt_jax import cli_flags, config as config_lib
from aogpt_jax.bench import generating, measure, peers, reading, scoring, training
from aogpt_jax.bench.measure import Timing
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import bench
from aogpt_jax.training import plan as plan_lib

CONFIG = config_lib.from_dict({
    'model': dict(vocab_size=32, context_length=8, num_layers=1, num_heads=2, embed_dim=8,
                  condition_dim=4, scan_layers=False),
    'data': dict(tokenizer='bytes'),
    'train': dict(batch_size=2), 'eval': dict(batch_size=4),
    'sample': dict(num_samples=2, temperature=0.9, top_p=0.95)})
PEAK = measure.Peak(1e6, 'float32', (2, 2, 2))


@pytest.fixture
def fake(monkeypatch):
  """Runs take what fake({name: seconds}) says, in the order of the runs; none is called."""
  monkeypatch.setattr(measure, 'model_peak', lambda model: (PEAK, 'Peak.'))
  monkeypatch.setattr(training, 'make_step',
                      lambda config, tokens: training.Step(lambda: None, 1.0, 2.0, 3))
  monkeypatch.setattr(plan_lib, 'counted_flops', lambda config: 1e6)
  monkeypatch.setattr(peers, 'train_step', lambda *args: (lambda: None, 'AdamW', 4))
  for name in ('generation', 'scoring'):
    monkeypatch.setattr(peers, name, lambda *args: lambda: None)

  def set_seconds(*seconds):
    def interleaved(runs, warm_up=True, calls=1):
      assert len(runs) == len(seconds), list(runs)
      return {name: Timing(9.0, [s]) for name, s in zip(runs, seconds)}
    monkeypatch.setattr(measure, 'interleaved', interleaved)
  return set_seconds


@pytest.mark.parametrize(('suite', 'tokens'), [
    (training.train, (16, 16, 16)), (scoring.evaluate, (32, 32, 32)),
    (generating.generate, (16, 16, 14))])  # GPT-2 is given the first token of both texts
def test_the_ratio_to_the_peer_is_that_of_the_rates(suite, tokens, fake):
  fake(1.0, 2.0, 8.0)
  rows = next(suite(CONFIG, 'gpt2')).rows
  for row, count, seconds in zip(rows, tokens, (1.0, 2.0, 8.0)):
    assert row['tokens_per_second'] == count / seconds
    assert row['to_peer'] == pytest.approx(row['tokens_per_second'] / rows[2]['tokens_per_second'])
    assert row['share'] == count * row['flops_per_token'] / seconds / PEAK.flops
    assert row['first_seconds'] == 9.0
  forward = 2 * (12 * 64 + 8 * 32) + 4 * 8 * 8
  assert {row['flops_per_token'] for row in rows} == {forward * (3 if suite is training.train
                                                                 else 1)}


def test_a_training_step_is_compiled_apart(fake):
  fake(1.0, 2.0, 8.0)
  ours, _, theirs = next(training.train(CONFIG, 'gpt2')).rows
  assert (ours['trace_seconds'], ours['compile_seconds'], ours['parameters']) == (1.0, 2.0, 3)
  assert 'compile_seconds' not in theirs and theirs['parameters'] == 4


def test_growth_of_seconds_beside_that_of_items(fake):
  """8 tokens in 2 steps: 8 copies and 3 caught up, in each of 2 rows."""
  fake(1.0, 3.0, 12.0, 2.0, 4.0, 10.0)
  rows = next(generating.growth(CONFIG)).rows
  assert [(r['length'], r['steps'], r['items']) for r in rows] == [
      (8, 2, 22), (16, 4, 50), (32, 8, 106), (8, 8, 16), (16, 16, 32), (32, 32, 64)]
  assert [r.get('seconds_growth') for r in rows] == [None, 3.0, 4.0, None, 2.0, 2.5]
  assert [r.get('items_growth') for r in rows] == [None, 50 / 22, 106 / 50, None, 2.0, 2.0]


def test_the_share_of_the_rule(fake):
  fake(4.0, 1.0, 3.0)
  cut, free, greedy = next(generating.top_p(CONFIG)).rows
  assert 'share_of_rule' not in cut
  assert (free['share_of_rule'], greedy['share_of_rule']) == (0.75, 0.25)
  no_rule = dataclasses.replace(CONFIG, sample=config_lib.SampleConfig(top_p=1.0))
  with pytest.raises(UserError, match=r'sample.top_p=1.0: must be below 1'):
    next(generating.top_p(no_rule))


def test_the_curve_over_steps():
  def curve(n, steps=0):
    return generating._curve(dataclasses.replace(
        CONFIG, model=dataclasses.replace(CONFIG.model, context_length=n),
        sample=config_lib.SampleConfig(steps=steps)))
  assert curve(1024) == [64, 128, 256, 512] and curve(128) == [64] and curve(200) == [64]
  assert curve(8, steps=4) == [4]
  with pytest.raises(UserError, match='model.context_length=100: must be at least 128'):
    curve(100)


def test_the_loader_against_the_step(fake, monkeypatch, tmp_path):
  """256 batches in 2 s against one in half a second."""
  text = tmp_path / 'text.txt'
  text.write_text('One two three. ' * 20)
  config = dataclasses.replace(CONFIG, data=config_lib.DataConfig(train=f'files:{text}'))
  fake(2.0, 0.5)
  from aogpt_jax.data import tokenizers
  loader, step = next(reading.loader(config, tmp_path / 'data', tokenizers.make_tokenizer('bytes'))
                      ).rows
  assert (loader['tokens_per_second'], step['tokens_per_second']) == (256 * 16 / 2, 16 / 0.5)
  assert loader['to_step'] == loader['tokens_per_second'] / step['tokens_per_second']
  assert step['to_step'] is None


def _fake_plan(config, mesh, quick=True):
  assert (config.train.batch_size, config.train.accumulation, mesh.size) == (8, 1, 1)
  temporary = {0: 120, 4: 30}[config.model.loss_chunk]
  return plan_lib.Plan(None, 80, temporary, 0.0, 0.0)


def test_the_memory_of_a_chunked_loss_against_all_logits(monkeypatch):
  monkeypatch.setattr(plan_lib, 'plan_step', _fake_plan)
  config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, loss_chunk=4))
  chunked, full = training.memory_of_loss(config).rows
  assert (chunked['temporary_bytes'], chunked['all_bytes']) == (30, 110)
  assert (chunked['temporary_share'], chunked['all_share']) == (0.25, 0.55)
  assert full['temporary_share'] == full['all_share'] == 1


@pytest.mark.slow
def test_chunks_save_memory_where_logits_are_most_of_it():
  model = dataclasses.replace(CONFIG.model, vocab_size=4096, context_length=64, loss_chunk=8)
  chunked, full = training.memory_of_loss(dataclasses.replace(CONFIG, model=model)).rows
  assert chunked['temporary_share'] < 0.5
  assert full['temporary_bytes'] > 8 * 64 * 4096 * 4


def test_missing_pytorch_is_one_line_before_any_device(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  monkeypatch.setattr(bench.machine, 'describe', None)  # is the first to ask for devices
  with pytest.raises(UserError) as error:
    bench.run(CONFIG, pathlib.Path(), 'generate')
  assert str(error.value) == ("--peer=gpt2: torch is not installed; pip install -e '.[bench]', or "
                              'leave the other side out with --peer=none')


@pytest.mark.parametrize(('section', 'changes', 'message'), [
    ('sample', dict(num_samples=0), 'sample.num_samples=0: must be at least 1'),
    ('model', dict(context_length=1), 'model.context_length=1: must be at least 2'),
    ('model', dict(architecture='encoder', target_injection='none', position_encoding='rotary'),
     "model.architecture='encoder': must be 'decoder'"),
    ('model', dict(target_injection='none'), "model.target_injection='none': must tell")])
@pytest.mark.parametrize('suite', bench.OF_GENERATION)
def test_what_cannot_be_generated_is_one_line_before_any_device(suite, section, changes, message):
  order = config_lib.OrderConfig('left_to_right')
  if 'architecture' in changes:
    order = config_lib.OrderConfig('uniform')
  config = dataclasses.replace(CONFIG, order=order, **{
      section: dataclasses.replace(getattr(CONFIG, section), **changes)})
  with pytest.raises(UserError) as error:
    bench.run(config, pathlib.Path('none'), suite, 'none')
  assert str(error.value).startswith(message)


def test_a_real_run_without_a_peer_prints_and_writes_the_same(monkeypatch, tmp_path, capsys):
  """The step is compiled and run, its state carried on; PyTorch is not needed."""
  monkeypatch.setitem(sys.modules, 'torch', None)
  monkeypatch.setattr(measure, 'REPEATS', 2)
  monkeypatch.setattr(measure, 'SHAPES', ((8, 8, 8),))
  bench.run(CONFIG, tmp_path, 'train', 'none', tmp_path / 'out')
  printed = capsys.readouterr().out
  found = json.loads((tmp_path / 'out' / 'bench_train.json').read_text())
  page = (tmp_path / 'out' / 'bench_train.md').read_text()
  table = [line for line in page.splitlines() if line.startswith('|')]
  assert len(table) == 4 and all(line in printed for line in table)
  assert found['config']['model']['embed_dim'] == 8 and found['peer'] is None
  for row, line in zip(found['results'], table[2:]):
    cells = [cell.strip() for cell in line.strip('|').split('|')]
    assert cells[0] == row['name'] and cells[4] == '–'
    assert cells[1] == f'{row["parameters"]:,}' and row['runs'] == 2
    assert row['tokens_per_second'] == pytest.approx(16 / row['seconds'])
    assert row['first_seconds'] > 0 and row['compile_seconds'] > 0


def test_every_suite_has_a_flag_and_every_flag_a_suite():
  assert set(cli_flags.SUITES) == {'samplers', *bench.AGAINST_PEER, *bench.ALONE, *bench.OF_DATA}
