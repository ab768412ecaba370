"""The masked encoder and the left-to-right GPT through the whole job: train, validate, generate."""

import dataclasses
import json

import pytest

import aogpt_jax
from aogpt_jax import config as config_lib
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import sample, train

TEXT = 'One two three four five six seven eight nine ten.\nOnce more!\n'


def _run(directory, model, order):
  """Trains 150 steps; returns the loaded run, its evaluation and the records of its metrics."""
  (directory / 'text.txt').write_text(TEXT * 40)
  config = config_lib.from_dict({
      'model': dict(vocab_size=320, context_length=16, num_layers=1, num_heads=2, embed_dim=32,
                    init_std=0.1) | model, 'order': dict(name=order),
      'data': dict(train=f'files:{directory}/text.txt', validation=f'files:{directory}/text.txt',
                   vocab_size=290),
      'optimizer': dict(learning_rate=1e-2, warmup_steps=10, ema_decay=0.9),
      'train': dict(num_steps=150, batch_size=8, log_every=50, eval_every=75, checkpoint_every=0),
      'eval': dict(num_orders=2, batch_size=8, prefix_blocks=5), 'sample': dict(num_samples=0)})
  train.run(config, directory / 'run')
  lines = (directory / 'run' / 'metrics.jsonl').read_text().splitlines()
  return (aogpt_jax.load(directory / 'run'),
          json.loads((directory / 'run' / 'evaluation.json').read_text()),
          [json.loads(line) for line in lines])


def test_encoder(tmp_path):
  """Its bound at every validation, prefixes at the end alone; it learns, fills holes and scores."""
  lm, evaluation, records = _run(
      tmp_path, dict(architecture='encoder', target_injection='none', position_encoding='rotary'),
      'uniform')
  prefix, bound = evaluation['estimates']
  assert (prefix['order'], prefix['num_blocks']) == ('left_to_right', 5)
  assert (bound['order'], bound['num_draws']) == ('uniform', 2) and bound['num_blocks'] > 5
  assert bound['nats_per_token'] < evaluation['unigram_nats_per_token'] - 0.3
  validated = [{name for name in r if name.startswith('validation')} for r in records]
  both = {f'validation/{order}/{unit}' for order in ('left_to_right', 'uniform')
          for unit in ('nats_per_token', 'perplexity')}
  assert [v for v in validated if v] == [{name for name in both if 'uniform' in name}, both]
  assert len(set(lm.sample(2, steps=4))) == 2
  filled = lm.infill('One <mask:2> three', seed=1)[0]
  assert filled.startswith('One ') and filled.endswith(' three')
  likely, unlikely = lm.score(['One two three', 'xqz!Two vv...'])
  assert 0 < likely.nats < unlikely.nats


@pytest.mark.slow
def test_left_to_right_gpt(tmp_path, capsys, caplog):
  """Scored and sampled in its own order; it continues a text and refuses any other hole."""
  lm, evaluation, _ = _run(
      tmp_path, dict(target_injection='none', norm='layernorm', qk_norm=False, tie_embeddings=True,
                     head_bias=False), 'left_to_right')
  (estimate,) = evaluation['estimates']
  assert estimate['order'] == 'left_to_right'
  assert estimate['nats_per_token'] < evaluation['unigram_nats_per_token'] - 0.3
  assert len(set(lm.sample(2))) == 2
  assert lm.infill('One two<mask:3>')[0].startswith('One two')
  with pytest.raises(UserError, match='knows the order left_to_right only.*the hole is at the end'):
    lm.infill('One <mask:2> three')
  (tmp_path / 'again').mkdir()
  config = dataclasses.replace(lm.config, sample=config_lib.SampleConfig(
      num_samples=0, infill='a <mask> b'))
  with pytest.raises(UserError, match='sample.infill: template=.*--config.sample.infill= leaves'):
    train.run(config, tmp_path / 'again')
  assert not (tmp_path / 'again' / 'config.json').exists()  # before any training
  capsys.readouterr()
  sample.run(config, tmp_path / 'run')  # the config's template may be that of another run
  assert 'samples' not in capsys.readouterr().out and 'sample.infill is left out' in caplog.text
  with pytest.raises(UserError, match="order='uniform': this model is not told the next position"):
    lm.score(['One'], order='uniform')
