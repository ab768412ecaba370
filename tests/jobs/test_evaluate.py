"""--mode=evaluate and --mode=score: the tables, files and plots of a run; mistakes in one line."""

import dataclasses
import json
import math
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

import aogpt_jax
from aogpt_jax import config as config_lib, data, evaluation, interop
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import convert, evaluate, score
from aogpt_jax.model import AOGPT, MaskedEncoder

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'reference_checkpoint.pt'


@pytest.fixture(scope='module')
def config(text_run):
  config = config_lib.from_json((text_run / 'config.json').read_text())
  return dataclasses.replace(
      config, eval=dataclasses.replace(config.eval, batch_size=8, num_ensembles=2,
                                       ensemble_steps=4),
      mesh=config_lib.MeshConfig(data=8))


@pytest.fixture(scope='module')
def other_corpus(tmp_path_factory):
  path = tmp_path_factory.mktemp('corpus') / 'other.txt'
  path.write_text('Nine eight seven, nine eight seven.\n' * 21)
  return f'files:{path}'


def test_perplexities_of_two_corpora(config, text_run, other_corpus, tmp_path, capsys):
  """Every corpus in every order: the run's own validation again, units by hand, plots."""
  own = config.data.validation
  evaluate.run(config, tmp_path, text_run, [own, other_corpus], None, '', tmp_path / 'out')
  page = capsys.readouterr().out
  found = json.loads((tmp_path / 'out' / 'perplexity.json').read_text())
  rows = {(row['corpus'], row['order']): row for row in found['results']}
  assert {order for _, order in rows} == {'left_to_right', 'uniform', 'uniform, ensemble of 1',
                                          'uniform, ensemble of 2'}
  assert len(rows) == 8 and (found['step'], found['ema']) == (30, True)
  trained = json.loads((text_run / 'evaluation.json').read_text())['estimates']
  for estimate in trained:  # written at the end of training
    row = rows[own, estimate['order']]
    assert row['nats_per_token'] == pytest.approx(estimate['nats_per_token'], abs=1e-5)
    assert f'{row["perplexity"]:.2f} ± {row["perplexity_error"]:.2f}' in page
  row = rows[other_corpus, 'uniform']
  text = 'Nine eight seven, nine eight seven.\n' * 21
  tokenizer = aogpt_jax.load(text_run).tokenizer
  ids = tokenizer.encode(text)
  tokens = (len(ids) + 1) // 16 * 16  # with end-of-text, without the rest that fills no block
  assert row['num_tokens'] == tokens == row['num_blocks'] * 16
  num_bytes = len(tokenizer.decode(ids[:tokens]))
  assert num_bytes < len(text)
  assert row['bits_per_byte'] == pytest.approx(
      row['nats_per_token'] * tokens / math.log(2) / num_bytes)
  assert row['perplexity_per_word'] == pytest.approx(
      math.exp(row['nats_per_token'] * tokens / (126 * num_bytes / len(text))))
  assert row['perplexity_error'] == pytest.approx(row['perplexity'] * math.hypot(
      row['error_over_orders'], row['error_over_blocks']))
  assert (tmp_path / 'out' / 'ensemble.png').read_bytes().startswith(b'\x89PNG')


def test_raw_weights_and_one_named_order(config, text_run, tmp_path):
  """--config.eval.ema=False evaluates other weights; blockwise needs no training in it."""
  raw = dataclasses.replace(config, eval=dataclasses.replace(config.eval, ema=False,
                                                             num_ensembles=0))
  evaluate.run(raw, tmp_path, text_run, None, ['blockwise'], '', tmp_path / 'raw')
  (row,) = json.loads((tmp_path / 'raw' / 'perplexity.json').read_text())['results']
  lm = aogpt_jax.load(text_run, ema=False)
  prepared = data.prepare(tmp_path / 'data', config.data.validation, lm.tokenizer, 16)
  blocks = data.open_blocks(prepared)
  order = np.asarray(lm.order('blockwise').sample(jax.random.key(0), 1, 16))
  scores = [evaluation.ensemble_nll(lm.model, blocks[i][None], order, 1, None).mean()
            for i in range(len(blocks))]
  assert row['nats_per_token'] == pytest.approx(np.mean(scores), abs=1e-5)
  assert row['order'] == 'blockwise' and row['error_over_orders'] is None


def test_quality_of_texts_under_a_judge(config, text_run, tmp_path, capsys):
  """The grid of steps × decodings; the run judges its own texts; greedy ones have less entropy."""
  small = dataclasses.replace(
      config, sample=config_lib.SampleConfig(num_samples=16),
      eval=dataclasses.replace(config.eval, generation_steps=(4, 16, 64), top_ps=(1.0, 0.5),
                               temperatures=(1.5, 0.2)))
  small = dataclasses.replace(small, eval=dataclasses.replace(small.eval, num_ensembles=0))
  with pytest.raises(UserError, match='--order=.*is not used with --judge'):
    evaluate.run(small, tmp_path, text_run, orders=['uniform'], judge=str(text_run))
  evaluate.run(small, tmp_path, text_run, judge=str(text_run))
  found = json.loads((tmp_path / 'evaluation' / 'generation.json').read_text())
  rows = {(row['steps'], row['top_p']): row for row in found['results']}
  assert set(rows) == {(4, 1.0), (16, 1.0), (4, 0.5), (16, 0.5)}  # 64 steps are 16 here
  assert rows[16, 0.5]['perplexity'] < rows[16, 1.0]['perplexity']
  assert rows[16, 0.5]['entropy'] < rows[16, 1.0]['entropy']
  lm = aogpt_jax.load(text_run)
  texts = lm.sample(16, steps=4, top_p=0.5, temperature=0.2, seed=0)
  assert rows[4, 0.5]['length'] == pytest.approx(np.mean([len(t) for t in texts]))
  page = capsys.readouterr().out
  assert '| decoding | 4 | 16 |' in page and 'top-p 0.5, T 0.2' in page
  assert (tmp_path / 'evaluation' / 'generation.png').read_bytes().startswith(b'\x89PNG')


@pytest.fixture(scope='module')
def reference_file(tmp_path_factory):
  """A checkpoint of the reference for texts in bytes."""
  model = AOGPT(config_lib.ModelConfig(vocab_size=260, context_length=16, num_layers=1, num_heads=2,
                                       embed_dim=16), rngs=nnx.Rngs(0))
  path = tmp_path_factory.mktemp('reference') / 'x.pt'
  interop.save_reference(model, path, model, step=7)
  return path


def test_a_reference_file_and_the_run_made_of_it(config, reference_file, other_corpus, tmp_path):
  """--tokenizer names what neither has; converted with it, the run has it."""
  convert.run(reference_file, tmp_path / 'run', tokenizer='bytes')
  plain = dataclasses.replace(config, eval=dataclasses.replace(config.eval, num_ensembles=0))
  found = []
  for source, tokenizer in ((reference_file, 'bytes'), (tmp_path / 'run', '')):
    evaluate.run(plain, tmp_path, source, [other_corpus], ['left_to_right'], '', tmp_path / 'out',
                 tokenizer)
    found.append(json.loads((tmp_path / 'out' / 'perplexity.json').read_text()))
  assert found[0]['results'] == found[1]['results'] and found[0]['step'] == 7
  assert found[0]['tokenizer_fingerprint'] == found[1]['tokenizer_fingerprint']
  assert found[0]['results'][0]['num_tokens'] == 757 // 16 * 16
  assert aogpt_jax.load(tmp_path / 'run').infill('One <mask:2>!', seed=0)[0].startswith('One ')
  with pytest.raises(UserError, match='has its own; leave it out'):
    aogpt_jax.load(tmp_path / 'run', tokenizer='bytes')
  with pytest.raises(UserError, match='came without a tokenizer.*--tokenizer=gpt2'):
    evaluate.run(plain, tmp_path, reference_file)
  with pytest.raises(UserError, match="tokenizer='bytes': has 257 ids, but the model knows 61"):
    aogpt_jax.load(GOLDEN, tokenizer='bytes')


def test_an_encoder(config, text_run, other_corpus, tmp_path):
  """Its bound, and left to right on some blocks; an ensemble is refused."""
  encoder_config = dataclasses.replace(
      config, order=config_lib.OrderConfig('uniform'), model=config_lib.ModelConfig(
          architecture='encoder', target_injection='none', vocab_size=320, context_length=16,
          num_layers=1, num_heads=2, embed_dim=16),
      eval=dataclasses.replace(config.eval, num_ensembles=0, prefix_blocks=3))
  lm = dataclasses.replace(
      aogpt_jax.load(text_run), config=encoder_config,
      model=MaskedEncoder(encoder_config.model, rngs=nnx.Rngs(0)))
  rows, ensembles = evaluate.perplexities(encoder_config, lm, [other_corpus], [], tmp_path)
  assert [(row['order'], row['num_blocks'] == 3) for row in rows] == [
      ('left_to_right', True), ('uniform', False)]
  assert ensembles == [] and all(5 < row['nats_per_token'] < 7 for row in rows)  # log(320) = 5.8
  many = dataclasses.replace(encoder_config, eval=config.eval)
  with pytest.raises(UserError, match='num_ensembles=2: must be 0 for this model'):
    evaluate._check(many, lm, [], [])


@pytest.mark.parametrize(('changes', 'args', 'message'), [
    ({}, dict(orders=['uniforn']), 'did you mean "uniform"'),
    ({}, dict(corpora_=['files:none.txt']), 'no file matches'),
    ({'ensemble_steps': 17}, {}, 'ensemble_steps=17: must be at most the 16'),
    ({'batch_size': 9}, {}, 'eval.batch_size=9: rows are split over'),
    ({'num_ensembles': 0}, dict(judge='nowhere'), '--judge=nowhere'),
    ({}, dict(output=pathlib.Path('/proc/x')), '--output=/proc/x: cannot be written'),
    ({}, dict(source='nowhere'), 'not a run directory')])
def test_mistakes(config, text_run, tmp_path, changes, args, message):
  changed = dataclasses.replace(config, eval=dataclasses.replace(config.eval, **changes))
  args = dict(source=text_run) | args
  args['source'] = pathlib.Path(args['source'])
  with pytest.raises(UserError, match=message):
    evaluate.run(changed, tmp_path, **args)


def test_score_writes_a_line_a_text(config, text_run, tmp_path, capsys):
  """Texts, JSON strings and objects with spans; --text is a sentence."""
  path = tmp_path / 'in.jsonl'
  path.write_text('One two\n"One\\ntwo"\n\n{"text": "One two three", "spans": [[4, 7]]}\n')
  score.run(config, text_run, str(tmp_path / 'out.jsonl'), None, str(path), 'left_to_right')
  records = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
  assert [r['text'] for r in records] == ['One two', 'One\ntwo', 'One two three']
  lm = aogpt_jax.load(text_run)
  assert records[0]['nats'] == pytest.approx(lm.score(['One two'])[0].nats, abs=1e-4)
  (span,) = records[2]['spans']
  assert (span['start'], span['end']) == (4, 7)
  assert span['nats'] == pytest.approx(sum(records[2]['token_nats']), abs=1e-4)
  score.run(config, text_run, '', 'One two', None, 'left_to_right')
  assert f'{records[0]["nats"]:.4f} nats, {records[0]["num_tokens"]} tokens' in (
      capsys.readouterr().out)


@pytest.mark.parametrize(('content', 'message'), [
    (None, 'cannot be read: No such file'), ('', 'holds no text'),
    ('a\n{"text": 1}', 'text 2: must be a text, or an object'),
    ('{"text"', 'line 1 starts with a brace but is no JSON object'),
    ('one\n' + 'x' * 99, 'text 2: .*has 99 tokens, must have 1..16'),
    ('{"text": ""}', 'text 1: .*not empty')])
def test_score_mistakes(config, text_run, tmp_path, content, message):
  path = tmp_path / 'in.jsonl'
  if content is not None:
    path.write_text(content)
  with pytest.raises(UserError, match=message):
    score.run(config, text_run, '', None, str(path), 'left_to_right')
