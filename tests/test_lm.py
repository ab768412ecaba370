"""A trained run in text: load, sample, infill, score."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import aogpt_jax
from aogpt_jax import lm as lm_lib
from aogpt_jax.config import Config, OrderConfig, SampleConfig
from aogpt_jax.errors import UserError


@pytest.fixture(scope='module')
def lm(text_run):
  return aogpt_jax.load(text_run)


def test_load_takes_a_run_a_step_and_either_weights(text_run, lm):
  """The newest step by default; EMA and raw weights differ; a step of it by its directory."""
  assert lm.step == 30
  assert aogpt_jax.load(text_run / 'checkpoints' / '00000020').step == 20
  raw = aogpt_jax.load(text_run, ema=False)
  assert not np.allclose(raw.model.head.bias[...], lm.model.head.bias[...])
  with pytest.raises(UserError, match='no finished checkpoint of step 7; there are'):
    aogpt_jax.load(text_run / 'checkpoints' / '00000007')
  with pytest.raises(UserError, match='not a run directory'):
    aogpt_jax.load(text_run.parent)


def test_a_newest_checkpoint_without_its_manifest_is_not_passed_over(text_run, tmp_path):
  """The older one is loaded only by its own directory."""
  shutil.copytree(text_run, tmp_path / 'run')
  (tmp_path / 'run' / 'checkpoints' / '00000030' / 'manifest.json').unlink()
  with pytest.raises(UserError, match='00000030/manifest.json: is missing'):
    aogpt_jax.load(tmp_path / 'run')
  assert aogpt_jax.load(tmp_path / 'run' / 'checkpoints' / '00000020').step == 20


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
    'O<mask>e\n  two <mask:2>\n', r'\<mask> <mask>'])
def test_infill_changes_nothing_but_the_holes(lm, template):
  """The text between the holes comes back byte for byte, in order."""
  filled = lm.infill(template, num_samples=2, seed=3)
  assert len(filled) == 2
  known = [part for part in lm_lib.check_template(template, lm.tokenizer, lm.config).parts
           if isinstance(part, str)]
  for text in filled:
    at = 0
    for piece in known:
      at = text.index(piece, at) + len(piece)
    if not template.startswith('<'):
      assert text.startswith(known[0])
    if not template.endswith('>'):
      assert text.endswith(known[-1])


def test_a_batch_of_templates_is_each_of_them_alone(lm):
  """Hole first, last, nothing else, two next to each other, none: in one call, and by itself."""
  batch = ['<mask:2> two', 'One two<mask:3>', '<mask:5>', 'One<mask:2><mask>ten', 'no hole\n']
  options = SampleConfig(num_samples=2, steps=2, seed=5)
  together = list(lm.complete(batch, options))
  assert [c.text for c in together] == lm.infill(batch, num_samples=2, steps=2, seed=5)
  assert [c.text for c in together[8:]] == ['no hole\n'] * 2
  alone = lm.complete(batch, dataclasses.replace(options, batch_size=1))  # no batch mates
  for number, (c, other) in enumerate(zip(together, alone, strict=True)):
    template = batch[number // 2]
    assert (c.text, c.order.tolist()) == (other.text, other.order.tolist())
    np.testing.assert_allclose(c.log_prob, other.log_prob, rtol=0, atol=1e-5)
    parsed = lm_lib.check_template(template, lm.tokenizer, lm.config)
    np.testing.assert_array_equal(c.tokens[parsed.known], parsed.tokens[parsed.known])
    np.testing.assert_array_equal(np.sort(c.order), np.flatnonzero(~parsed.known))
    np.testing.assert_array_equal(c.step == -1, parsed.known)
    np.testing.assert_array_equal(np.isnan(c.log_prob), parsed.known)
    assert ''.join(c.pieces) == c.text and len(c.pieces) == len(c.tokens)


def test_log_probs_and_ranks_are_those_of_the_model(lm):
  """One token a step: the chain rule along the order; ranks by counting larger logits."""
  (c,) = lm.complete(['One <mask:4> ten'], SampleConfig(num_samples=1, temperature=0.7, seed=2))
  known = np.flatnonzero(c.step == -1)
  order = np.concatenate([known, c.order]).astype(np.int32)[None]
  logits = np.asarray(jax.nn.log_softmax(lm.model(c.tokens[None], order)))[0, len(known):]
  drawn = c.tokens[c.order]
  want = logits[np.arange(4), drawn]
  np.testing.assert_allclose(c.log_prob[c.order], want, rtol=0, atol=1e-4)
  np.testing.assert_array_equal(c.rank[c.order], (logits > want[:, None]).sum(axis=1))
  np.testing.assert_array_equal(c.step[c.order], np.arange(4))


def test_continue_text(lm):
  """A hole at the end; the text is taken literally."""
  text = r'One <mask:2> \<mask>'
  (out,) = lm.continue_text(text[:12], 3, seed=1)
  assert out.startswith(text[:12])
  for tail in ('a\\', 'a\\\\', 'a<mask:', '\\<mask>\\'):
    (out,) = lm.continue_text(tail, 2, seed=1)
    assert out.startswith(tail) and '<mask:2>' not in out
  assert lm.continue_text('One two', 3, seed=1) == lm.infill('One two<mask:3>', seed=1)
  with pytest.raises(UserError, match='a hole is <mask:k> with k in 1..16'):
    lm.continue_text('One', 0)


def test_samplers_schedules_and_rules_are_options(lm):
  """sequential ignores steps; cosine and left to right change the text; a wrong name is refused."""
  assert lm.sample(1, steps=4, sampler='sequential') == lm.sample(1)
  texts = {lm.sample(1, steps=4, seed=1, **options)[0] for options in (
      {}, {'schedule': 'cosine'}, {'order': 'left_to_right'}, {'temperature': 0.2},
      {'top_k': 1}, {'final_temperature': 0.0})}
  assert len(texts) >= 5
  with pytest.raises(UserError, match='sample.topk: no such config field; did you mean "top_k"'):
    lm.sample(1, topk=1)


@pytest.mark.parametrize(('template', 'message'), [
    ('', 'must be a text that is not empty'), (3, 'must be a text'),
    ('<mask:0>', 'k in 1..16 tokens'), ('<mask:17>', 'k in 1..16 tokens'),
    ('<mask:99999999999999>', 'k in 1..16'), (f'<mask:{"9" * 5000}>', 'k in 1..16'),
    ('a <mask:> b', 'a hole is <mask:k>'), ('a <mask:x>', 'a hole is <mask:k>'),
    ('<mask:9><mask:8>', 'has 17 tokens, must have 1..16')])
def test_infill_errors(lm, template, message):
  with pytest.raises(UserError, match=message):
    lm.infill([template])


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
  one, two = (lm.score([text], order='uniform', seed=seed)[0] for seed in (1, 2))
  assert one.nats != two.nats
  with pytest.raises(UserError, match=r'text 2: .*not empty'):
    lm.score([text, ''])
  with pytest.raises(UserError, match='must be a list of texts'):
    lm.score(text)


def test_a_run_of_one_order_generates_and_scores_in_it(lm):
  """Not in orders that it never saw; a mixture is an any-order model."""
  assert dataclasses.replace(lm, config=Config()).generation_order == 'uniform'
  order = OrderConfig(name='fixed', permutation=tuple(range(15, -1, -1)))
  fixed = dataclasses.replace(lm, config=dataclasses.replace(lm.config, order=order))
  assert fixed.generation_order == 'fixed'
  drawn = fixed.order('fixed').sample(jax.random.key(0), 1, 16)
  np.testing.assert_array_equal(drawn[0], np.arange(15, -1, -1))
  assert fixed.sample(1, seed=0) != lm.sample(1, seed=0)


def test_a_tiny_temperature_is_greedy(lm):
  assert lm.sample(2, temperature=1e-40) == lm.sample(2, temperature=0.0)
