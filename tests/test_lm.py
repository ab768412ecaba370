"""A trained run in text: load, sample, infill, score."""

import dataclasses

import jax
import numpy as np
import pytest

import aogpt_jax
from aogpt_jax import config as config_lib, lm as lm_lib
from aogpt_jax.config import Config, OrderConfig
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import train

TEXT = 'One two three four five six seven eight nine ten.\nOnce more!\n'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  directory = tmp_path_factory.mktemp('lm')
  (directory / 'text.txt').write_text(TEXT * 40)
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


@pytest.fixture(scope='module')
def lm(run):
  return aogpt_jax.load(run)


def test_load_takes_a_run_a_step_and_either_weights(run, lm):
  """The newest step by default; EMA and raw weights differ; a step of it by its directory."""
  assert lm.step == 30
  assert aogpt_jax.load(run / 'checkpoints' / '00000020').step == 20
  raw = aogpt_jax.load(run, ema=False)
  assert not np.allclose(raw.model.head.bias[...], lm.model.head.bias[...])
  with pytest.raises(UserError, match='no finished checkpoint of step 7; there are'):
    aogpt_jax.load(run / 'checkpoints' / '00000007')
  with pytest.raises(UserError, match='not a run directory'):
    aogpt_jax.load(run.parent)


def test_samples_are_reproducible_and_of_the_tokenizer(lm):
  """Text i depends on the seed and on i alone; padding ids are not drawn (decode would raise)."""
  texts = lm.sample(3, steps=4, seed=1)
  assert texts == lm.sample(3, steps=4, seed=1) and texts != lm.sample(3, steps=4, seed=2)
  assert lm.sample(2, steps=4, seed=1) == texts[:2]
  assert len(set(texts)) == 3
  for bad, message in (({'steps': 17}, 'steps=17: must be in 1..16'),
                       ({'temperature': -1.0}, 'temperature=-1.0'),
                       ({'temperature': float('inf')}, 'must be finite'),
                       ({'seed': 2**64}, 'seed=18446744073709551616'),
                       ({'top_p': 1.5}, 'top_p=1.5'), ({'num_samples': 0}, 'num_samples=0')):
    with pytest.raises(UserError, match=message):
      lm.sample(**({'num_samples': 1} | bad))


@pytest.mark.parametrize('template', [
    '<mask:3> two', 'One <mask:2> three', 'One two <mask:2>', '<mask>', '<mask:2><mask:3>',
    'O<mask>e\n  two <mask:2>\n'])
def test_infill_changes_nothing_but_the_holes(lm, template):
  """The text between the holes comes back byte for byte, in order."""
  filled = lm.infill(template, num_samples=2, seed=3)
  assert len(filled) == 2
  for text in filled:
    at = 0
    known = lm_lib._HOLE.split(template)[::2]
    assert text.startswith(known[0]) and text.endswith(known[-1])
    for piece in known:
      at = text.index(piece, at) + len(piece)


def test_a_template_becomes_known_tokens_and_holes(lm):
  """Text around a hole is tokenized by itself."""
  tokens, known = lm_lib.parse_template('a<mask:2>b<mask>', lm.tokenizer, 16)
  assert known.tolist() == [True, False, False, True, False]
  np.testing.assert_array_equal(tokens[known], np.concatenate(
      [lm.tokenizer.encode('a'), lm.tokenizer.encode('b')]))


@pytest.mark.parametrize(('template', 'message'), [
    ('no hole', 'has no hole; write <mask:k>'), ('', 'has no hole'),
    ('<mask:0>', 'a hole must have 1..16 tokens'), ('<mask:17>', 'a hole must have 1..16 tokens'),
    ('<mask:99999999999999>', 'a hole must have 1..16'),
    (f'<mask:{"9" * 5000}>', 'a hole must have 1..16'),
    ('<mask:9><mask:8>', 'has 17 tokens, more than the context_length=16')])
def test_infill_errors(lm, template, message):
  with pytest.raises(UserError, match=message):
    lm.infill(template)


def test_score_is_the_chain_rule_and_ignores_padding(lm):
  """Equal to the NLL of the text alone; any order has its own likelihood."""
  from aogpt_jax import objective
  text = 'One two'
  ids = lm.tokenizer.encode(text)
  order = np.arange(len(ids), dtype=np.int32)[None]
  want = float(objective.token_nll(lm.model, ids[None], order).sum())
  score, other = lm.score([text, text + ' three'])
  assert score.num_tokens == len(ids)
  np.testing.assert_allclose(score.nats, want, rtol=1e-5)
  assert other.nats > score.nats
  assert lm.score([text], order='uniform', seed=1) != lm.score([text], order='uniform', seed=2)
  with pytest.raises(UserError, match=r'texts\[1\]=.*has 0 tokens'):
    lm.score([text, ''])
  with pytest.raises(UserError, match='must be a list of texts'):
    lm.score(text)


def test_a_run_of_one_order_generates_and_scores_in_it(lm):
  """Not in orders that it never saw; a mixture is an any-order model."""
  assert dataclasses.replace(lm, config=Config()).generation_order == 'uniform'
  order = OrderConfig(name='fixed', permutation=tuple(range(15, -1, -1)))
  fixed = dataclasses.replace(lm, config=dataclasses.replace(lm.config, order=order))
  assert fixed.generation_order == 'fixed'
  drawn = fixed._order('fixed').sample(jax.random.key(0), 1, 16)
  np.testing.assert_array_equal(drawn[0], np.arange(15, -1, -1))
  assert fixed.sample(1, seed=0) != lm.sample(1, seed=0)


def test_a_tiny_temperature_is_greedy(lm):
  assert lm.sample(2, temperature=1e-40) == lm.sample(2, temperature=0.0)
