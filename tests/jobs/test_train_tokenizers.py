"""A run keeps its tokenizer, whatever kind: afterwards it needs no cache, folder or network."""

import dataclasses

import pytest

import aogpt_jax
from aogpt_jax import config as config_lib
from aogpt_jax.data import byte_pair
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import train

TEXT = 'One two three four five six seven eight nine ten.\nOnce more <|endoftext|>!\n'


def small_gpt2():
  """A BPE of 260 ids in GPT-2's form."""
  pieces = [*(bytes([b]) for b in range(256)), b'en', b'ee', b' t', b'']
  return byte_pair.BytePairTokenizer(pieces, 259)


def make_config(tmp_path, tokenizer, num_steps=2):
  (tmp_path / 'text.txt').write_text(TEXT * 9)
  corpus = f'files:{tmp_path}/text.txt'
  return config_lib.from_dict({
      'model': dict(vocab_size=264, context_length=16, num_layers=1, num_heads=2, embed_dim=16,
                    condition_dim=8),
      'data': dict(train=corpus, validation=corpus, tokenizer=tokenizer),
      'optimizer': dict(warmup_steps=0),
      'train': dict(num_steps=num_steps, batch_size=8, eval_every=0, checkpoint_every=0),
      'eval': dict(num_orders=2), 'sample': dict(num_samples=0)})


@pytest.mark.parametrize('kind', ['gpt2', pytest.param('bytes', marks=pytest.mark.slow)])
def test_a_run_continues_and_loads_with_its_own_copy(tmp_path, monkeypatch, kind):
  def gone():
    raise UserError('no cache and no network')

  monkeypatch.setattr(byte_pair, 'load_gpt2', small_gpt2)
  config = make_config(tmp_path, kind)
  train.run(config, tmp_path / 'run')
  monkeypatch.setattr(byte_pair, 'load_gpt2', gone)
  longer = dataclasses.replace(
      config, train=dataclasses.replace(config.train, num_steps=3),
      optimizer=dataclasses.replace(config.optimizer, decay_steps=2))
  train.run(longer, tmp_path / 'run')
  lm = aogpt_jax.load(tmp_path / 'run')
  assert lm.step == 3
  assert (lm.tokenizer.vocab_size, lm.tokenizer.end_of_text_id) == {
      'gpt2': (260, 259), 'bytes': (257, 256)}[kind]
  assert lm.infill('seven <mask:3>ght', seed=0)[0].startswith('seven ')
  assert lm.score(['seven'])[0].num_tokens == len(lm.tokenizer.encode('seven'))


def test_an_unknown_tokenizer_is_one_line(tmp_path):
  with pytest.raises(UserError, match=r"data.tokenizer='gtp2': .*did you mean \"gpt2\"") as caught:
    train.run(make_config(tmp_path, 'gtp2'), tmp_path / 'run')
  assert '\n' not in str(caught.value)
