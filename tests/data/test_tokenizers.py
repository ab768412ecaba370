"""The tokenizer gives back every text, is deterministic and quiet, and drops no training text."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from aogpt_jax.data import corpora, tokenizers
from aogpt_jax.errors import UserError


def train(text, vocab_size):
  return tokenizers.train_sentencepiece([text], vocab_size)


@pytest.fixture(scope='module')
def documents():
  return list(corpora.read_documents('embedded:shakespeare:validation'))


@pytest.fixture(scope='module')
def tokenizer(documents):
  return tokenizers.train_sentencepiece(documents, 512)


TRICKY = [
  '', ' ', '  leading and trailing  ', '\n', '\n\n\n', 'a\tb\t', '\r\n\r', '\0', 'a\0b',
  ''.join(map(chr, range(32))) + '\x7f\x85\xa0', '\u2581', 'a\u2581 \u2581\u2581b', '\u2585',
  ' \u2047 ', '\ufffd', '</s>', '<s><unk><pad>', '<0x41>', '<0xE2><0x96><0x81>', 'e\u0301\u0327o',
  '\u65e5\u672c\u8a9e', '\U0001f468\u200d\U0001f469\u200d\U0001f467', '\ufb01 \uff21 \u3000',
  '\ufeffbom', '\u2028', '\uffff', '\U0010ffff', 'x' * 40000, '\u5b57' * 5000, ' ' * 5000,
]


@pytest.mark.parametrize('text', TRICKY, ids=ascii)
def test_tricky_texts_come_back(tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.dtype == np.int32
  assert ids.ndim == 1
  assert tokenizer.decode(ids) == text


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(st.characters(exclude_categories=['Cs']), st.sampled_from(TRICKY[:21])),
                max_size=20).map(''.join))
def test_any_text_comes_back_without_control_ids(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.end_of_text_id not in ids
  assert 0 not in ids  # the unknown piece


def test_whole_documents_come_back(tokenizer, documents):
  for text in documents:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_texts_that_spell_a_piece_are_their_characters(tokenizer):
  for text in ['</s>', '<0x41>', '<unk>']:
    assert tokenizer.encode(text).size > 1


def test_lone_surrogates_are_refused(tokenizer):
  with pytest.raises(UserError, match=r"'\\udc80' at character 2"):
    tokenizer.encode('ab\udc80')


def test_decoding_end_of_text_unknown_and_broken_bytes(tokenizer):
  hi = tokenizer.encode('hi').tolist()
  assert tokenizer.decode([1, *hi, 1, *hi]) == 'hihi'
  assert tokenizer.decode([*hi, 0]) == 'hi\ufffd'
  byte = 3  # the id of the byte 0x00
  assert tokenizer.decode([byte + 0xE2, byte + 0x96, *hi]) == '\ufffdhi'
  assert tokenizer.decode([byte + 0xFF, byte + 0x41]) == '\ufffdA'
  assert tokenizer.decode([]) == ''
  for token in range(tokenizer.vocab_size):
    tokenizer.decode([token])


@pytest.mark.parametrize('ids', [[3, 512], [-1]])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, ids):
  with pytest.raises(UserError, match=f'id {ids[-1]} is outside the vocabulary; valid: 0 to 511'):
    tokenizer.decode(ids)


@pytest.mark.parametrize('ids', [[[1, 2]], [1.0], 3])
def test_ids_of_another_kind_are_refused(tokenizer, ids):
  with pytest.raises(UserError, match='ids must be integers of shape'):
    tokenizer.decode(ids)


def test_training_is_deterministic_and_quiet(documents, tokenizer, capfd):
  again = tokenizers.train_sentencepiece(iter(documents), 512)
  assert again.fingerprint == tokenizer.fingerprint
  assert train(documents[0], 400).fingerprint != tokenizer.fingerprint
  assert capfd.readouterr() == ('', '')


def test_the_vocabulary_is_used_and_shortens_the_text(documents, tokenizer):
  size = sum(len(text.encode()) for text in documents)
  ids = np.concatenate([tokenizer.encode(text) for text in documents])
  assert tokenizer.vocab_size == 512
  assert size / ids.size > 1.7
  assert len(np.unique(ids)) > 230  # nearly all 254 learned pieces occur


def test_no_training_text_is_dropped():
  # One word in each place that sentencepiece would skip: after a NUL, a tab, its own marks, in a
  # long line, and behind an empty document. Each must have become one piece.
  words = ['after', 'tabby', 'marks', 'block', 'long']
  text = [f'{words[0]} \0{words[0]} ' * 50, f'\t{words[1]}' * 50, f'\u2581{words[2]}' * 50,
          f'\u2585{words[3]}' * 50, '', 'y' * 9000 + f' {words[4]}' * 50]
  tokenizer = tokenizers.train_sentencepiece(text, 309)
  for word in words:
    assert tokenizer.encode(word).size <= 2, word


def test_a_newline_is_always_one_token():
  """Also where it is frequent next to punctuation, doubled, or behind a carriage return."""
  tokenizer = tokenizers.train_sentencepiece(['ab,\n\ncd,\n', 'ab\r\n'] * 50, 266)
  newline = tokenizer.encode('\n').tolist()
  assert newline == [2]
  for text in ('ab,\n\ncd', '\r\n', '\n\n\n', ',\n'):
    assert tokenizer.encode(text).tolist().count(2) == text.count('\n')


@pytest.mark.parametrize('text', ['日本語の' * 3000 + ' 文', 'abc'])
def test_spaces_come_back_where_training_saw_few_or_none(text):
  tokenizer = train(text * 5, 264)
  assert tokenizer.decode(tokenizer.encode(' a  b ')) == ' a  b '


def test_runs_of_spaces_become_pieces():
  tokenizer = train('abc.\n\n    abc.\n\n    ' * 50, 270)
  assert tokenizer.encode('    ').size == 1


def test_sentences_keep_all_but_the_reserved_characters(documents):
  text = documents[0].replace('\n', ' ') + ' ' + 'z' * 40000 + '\n\t\0' + documents[1]
  sentences = list(tokenizers._training_sentences([text]))
  kept = ''.join(sentence.removesuffix(' ') if sentence.endswith('\r ') else sentence
                 for sentence in sentences)
  assert kept == re.sub('[\t\0\n]', '', text)
  assert max(map(len, sentences)) <= 16384 + 1
  # Cut only before a space, except in a word that is too long.
  starts = [b[0] for a, b in itertools.pairwise(sentences)
            if len(a) > 9000 and a[-1] != 'z' and a + b in text]
  assert set(starts) == {' '}


@pytest.mark.parametrize(('size', 'rule'), [
  (0, 'too small .* nearest valid is 267'), (-7, 'too small .* nearest valid is 267'),
  (266, 'too small .* nearest valid is 267'), (284, 'too large .* nearest valid is 283'),
  (2**20, 'too large .* nearest valid is 283'), (2**40, 'must be at most 1048576')])
def test_an_impossible_vocab_size_names_a_valid_one(size, rule):
  with pytest.raises(UserError, match=f'vocab_size = {size} (is )?{rule}'):
    train('hello\nworld', size)
  assert train('hello\nworld', 267).vocab_size == 267
  assert train('hello\nworld', 283).vocab_size == 283


@pytest.mark.parametrize('documents', [[], [''], ['\0\t']])
def test_no_text_to_train_on(documents):
  with pytest.raises(UserError, match='no text to train a tokenizer on'):
    tokenizers.train_sentencepiece(documents, 300)


def test_what_the_documents_raise_comes_through(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "a"}\nbad')
  with pytest.raises(UserError, match='line 2: not valid JSON'):
    tokenizers.train_sentencepiece(corpora.read_documents(f'files:{tmp_path}/a.jsonl'), 300)
  with pytest.raises(UserError, match='lone surrogate'):
    train('a\ud800', 300)


def test_save_and_load(tokenizer, tmp_path):
  path = tmp_path / 'run' / 'tokenizer.model'
  tokenizer.save(path)
  tokenizer.save(path)
  loaded = tokenizers.load_tokenizer(path)
  assert (loaded.fingerprint, loaded.vocab_size, loaded.end_of_text_id) == (
      tokenizer.fingerprint, 512, 1)
  assert [file.name for file in path.parent.iterdir()] == ['tokenizer.model']


def test_a_failed_save_keeps_the_old_file(tokenizer, tmp_path, monkeypatch):
  path = tmp_path / 'tokenizer.model'
  path.write_bytes(b'old')

  def fail(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(tokenizers.os, 'replace', fail)
  with pytest.raises(UserError, match='tokenizer.model: cannot be written: No space left'):
    tokenizer.save(path)
  assert [file.name for file in tmp_path.iterdir()] == ['tokenizer.model']
  assert path.read_bytes() == b'old'


def test_missing_and_damaged_models_are_refused(tokenizer, tmp_path):
  path = tmp_path / 'tokenizer.model'
  with pytest.raises(UserError, match=f'{path}: cannot read the tokenizer model: No such file'):
    tokenizers.load_tokenizer(path)
  tokenizer.save(path)
  whole = path.read_bytes()
  for data in [b'', b'garbage', whole[:100], whole[:-20]]:
    path.write_bytes(data)
    with pytest.raises(UserError, match=f'{path}: .*sentencepiece model'):
      tokenizers.load_tokenizer(path)


@pytest.mark.parametrize('options', [{'add_dummy_prefix': True}, {'byte_fallback': False},
                                     {'normalization_rule_name': 'nmt_nfkc'}, {'eos_id': -1},
                                     {'remove_extra_whitespaces': True}])
def test_a_model_that_loses_text_is_refused(options):
  import io

  import sentencepiece
  model = io.BytesIO()
  defaults = {'byte_fallback': True, 'normalization_rule_name': 'identity', 'vocab_size': 280,
              'add_dummy_prefix': False, 'remove_extra_whitespaces': False, 'minloglevel': 3,
              'hard_vocab_limit': False, 'model_type': 'bpe', 'bos_id': -1}
  text = ['some text that is long enough to train upon, word by word'] * 20
  sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=model,
                                           **{**defaults, **options})
  with pytest.raises(UserError, match='x.model: the sentencepiece model'):
    tokenizers.SentencePieceTokenizer(model.getvalue(), name='x.model')


def test_ids_are_their_own_text():
  """Decimal ids with white space between them, and nothing else."""
  tokenizer = tokenizers.IdsTokenizer(62)
  for text, ids in (('3 17 4', [3, 17, 4]), ('', []), (' 0\n 61 ', [0, 61])):
    encoded = tokenizer.encode(text)
    assert encoded.dtype == np.int32 and encoded.tolist() == ids
    assert tokenizer.decode(encoded) == ' '.join(text.split())
  for word in ('62', '-1', '03', '1.0', '1,2', 'one', '+1', '\u0663', '9' * 5000):
    with pytest.raises(UserError, match='is not an id; .* are ids from 0 to 61 '):
      tokenizer.encode(f'3 {word}')
  with pytest.raises(UserError, match='id 62 is outside the vocabulary'):
    tokenizer.decode([62])
  assert tokenizer.fingerprint != tokenizers.IdsTokenizer(61).fingerprint
