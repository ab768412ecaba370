"""GPT-2's byte-level BPE gives the ids of an independent tokenizer; every kind survives a file."""

import itertools
import json
import pickle
import shutil

import numpy as np
import pytest
import tokenizers as public
from hypothesis import given, settings, strategies as st

from aogpt_jax import data
from aogpt_jax.data import byte_pair, corpora, online, tokenizers
from aogpt_jax.errors import UserError

TRICKY = [
  '', ' ', '  two  ', '\n', '\n\n \n', 'a\tb\t ', '\r\n\r', '\0', 'a\0b', "don't I'll 's 'S ''s",
  ''.join(map(chr, range(32))) + '\x7f\x85\xa0', '\u65e5\u672c\u8a9e \u6587 \u3000x',
  '\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\U0001f600', 'e\u0301\u0327o', '\ufffd',
  '<|endoftext|>', 'a<|endoftext|>b', '123 4567 \u0663\u00bd', 'x' * 3000, ('ab' * 700 + '!') * 3,
  'Supercalifragilistic' * 50, ' ' * 500 + 'a' + ' ' * 500, '!?' * 300, 'a \u2028 b\u2029',
]


@pytest.fixture(scope='module')
def documents():
  return list(corpora.read_documents('embedded:shakespeare:validation'))


@pytest.fixture(scope='module')
def reference(documents):
  """A BPE of 1000 ids that the `tokenizers` library trained, with GPT-2's way to cut words."""
  trained = public.Tokenizer(public.models.BPE())
  trained.pre_tokenizer = public.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  trained.train_from_iterator(documents, public.trainers.BpeTrainer(
      vocab_size=999, show_progress=False,
      initial_alphabet=public.pre_tokenizers.ByteLevel.alphabet()))
  return trained


@pytest.fixture(scope='module')
def folder(reference, tmp_path_factory):
  """vocab.bpe and encoder.json, as GPT-2's are written."""
  folder = tmp_path_factory.mktemp('gpt2')
  model = json.loads(reference.to_str())['model']
  merges = [' '.join(pair) for pair in model['merges']]
  (folder / 'vocab.bpe').write_text('\n'.join(['#version: 0.2', *merges, '']), 'utf-8')
  (folder / 'encoder.json').write_text(json.dumps({**model['vocab'], '<|endoftext|>': 999}))
  return folder


@pytest.fixture(scope='module')
def tokenizer(folder):
  return data.make_tokenizer(f'gpt2:{folder}')


def test_the_ids_are_those_of_an_independent_tokenizer(reference, tokenizer, documents):
  lines = list(itertools.islice((line for text in documents for line in text.splitlines(True)),
                                1000))
  assert len(lines) == 1000
  for text in [*lines, *TRICKY, documents[0]]:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == reference.encode(text).ids, ascii(text[:80])
    assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(st.characters(exclude_categories=['Cs']), st.sampled_from(TRICKY[:13])),
                max_size=20).map(''.join))
def test_any_text(reference, tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.tolist() == reference.encode(text).ids
  assert tokenizer.decode(ids) == ''.join(tokenizer.pieces(ids)) == text
  bytes_tokenizer = data.make_tokenizer('bytes')
  assert bytes_tokenizer.decode(bytes_tokenizer.encode(text)) == text


def test_end_of_text(tokenizer):
  assert (tokenizer.vocab_size, tokenizer.end_of_text_id) == (1000, 999)
  ids = tokenizer.encode('<|endoftext|>')
  assert 999 not in ids and ids.size > 1
  assert tokenizer.decode([*ids, 999]) == '<|endoftext|>'
  assert not tokenizer.spaced
  with pytest.raises(UserError, match='id 1000 is outside the vocabulary'):
    tokenizer.decode([1000])


def test_bytes():
  tokenizer = data.make_tokenizer('bytes')
  assert tokenizer.encode('a\u00e9\0').tolist() == [97, 0xC3, 0xA9, 0]
  assert (tokenizer.vocab_size, tokenizer.end_of_text_id) == (257, 256)
  assert tokenizer.decode([97, 256, 0xC3]) == 'a\ufffd'
  assert tokenizer.pieces([0xC3, 0xA9, 97]) == ['', '\u00e9', 'a']


@pytest.fixture(params=['gpt2', 'bytes', 'sentencepiece'])
def each_kind(request, tokenizer):
  if request.param == 'sentencepiece':
    return tokenizers.train_sentencepiece(['some text to train upon\n' * 9], 275)
  return tokenizer if request.param == 'gpt2' else data.make_tokenizer('bytes')


@pytest.mark.parametrize('unit', ['a', ' ', '!', '\n', 'a ', '\u5b57'])
def test_a_million_of_anything_comes_back(each_kind, unit):
  """Takes hours with a merge that is quadratic, and overflows the stack of a backtracking cut."""
  text = unit * 10**6
  assert each_kind.decode(each_kind.encode(text)) == text


def test_every_kind_comes_back_from_a_file_and_a_pickle(each_kind, tmp_path):
  text = 'Hello <|endoftext|> </s> \u65e5\u672c\n'
  path = tmp_path / 'tokenizer.model'
  each_kind.save(path)
  for again in (data.load_tokenizer(path), data.make_tokenizer(str(path)),
                pickle.loads(pickle.dumps(each_kind))):
    assert type(again) is type(each_kind)
    assert again.fingerprint == each_kind.fingerprint
    assert (again.vocab_size, again.end_of_text_id) == (
        each_kind.vocab_size, each_kind.end_of_text_id)
    assert again.encode(text).tolist() == each_kind.encode(text).tolist()
  with pytest.raises(UserError, match='lone surrogate'):
    each_kind.encode('a\ud800')


def test_fingerprints_tell_tokenizers_apart(tokenizer):
  pieces = list(tokenizer._bytes)
  pieces[300], pieces[301] = pieces[301], pieces[300]
  other = byte_pair.BytePairTokenizer(pieces, 999)
  assert len({t.fingerprint for t in (tokenizer, other, data.make_tokenizer('bytes'))}) == 3


def test_damaged_saved_files(tokenizer, tmp_path):
  path = tmp_path / 'tokenizer.model'
  tokenizer.save(path)
  saved = json.loads(path.read_text())
  pieces = saved['pieces']
  for change, part in [
      ({'aogpt_jax_tokenizer': 'x'}, 'newer version'), ({'pieces': 3}, 'damaged'),
      ({'pieces': ['\u1234']}, 'damaged'), ({'end_of_text_id': 1000}, 'damaged'),
      ({'pieces': [*pieces[:-2], pieces[5], '']}, 'the same bytes'),
      ({'pieces': ['zz9', *pieces[1:]]}, 'no id stands for the byte 33')]:
    path.write_text(json.dumps({**saved, **change}))
    with pytest.raises(UserError, match=f'{path}: .*{part}'):
      data.load_tokenizer(path)
  path.write_text(json.dumps(saved)[:-9])
  with pytest.raises(UserError, match=f'{path}: damaged'):
    data.load_tokenizer(path)


@pytest.mark.parametrize(('name', 'change', 'part'), [
  ('encoder.json', lambda s: None, 'must hold vocab.bpe and encoder.json'),
  ('encoder.json', lambda s: s[:-1], 'encoder.json: not valid JSON'),
  ('encoder.json', lambda s: s.replace('999', '1000'), 'from 0 on without a gap'),
  ('encoder.json', lambda s: s.replace('<|endoftext|>', '<pad>'), "'<pad>' is in one only"),
  ('vocab.bpe', lambda s: s + 'a\n', 'line 745: must be two pieces'),
  ('vocab.bpe', lambda s: s + 'zz9 q\n', 'line 745: must be two pieces'),
  ('vocab.bpe', lambda s: s + 'Z Z\n', "line 745: 'ZZ' must have an id"),
  ('vocab.bpe', lambda s: s[:s.rindex('\n', 0, -1) + 1], 'is in one only'),
  ('vocab.bpe', lambda s: '\n'.join([*s.split('\n')[:1], *s.split('\n')[2:4],
                                     *s.split('\n')[1:2], *s.split('\n')[4:]]), 'greater than'),
])
def test_damaged_gpt2_files(folder, tmp_path, name, change, part):
  shutil.copytree(folder, tmp_path / 'copy')
  path = tmp_path / 'copy' / name
  text = change(path.read_text('utf-8'))
  path.unlink() if text is None else path.write_text(text, 'utf-8')
  with pytest.raises(UserError) as caught:
    data.make_tokenizer(f'gpt2:{tmp_path / "copy"}')
  assert part in str(caught.value) and '\n' not in str(caught.value)


def test_the_other_names_of_the_files(folder, tokenizer, tmp_path):
  shutil.copy(folder / 'vocab.bpe', tmp_path / 'merges.txt')
  shutil.copy(folder / 'encoder.json', tmp_path / 'vocab.json')
  assert data.make_tokenizer(f'gpt2:{tmp_path}').fingerprint == tokenizer.fingerprint


def test_gpt2_without_cache_and_network(monkeypatch, tmp_path):
  monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
  monkeypatch.setattr(online, 'reachable', lambda url: False)
  with pytest.raises(UserError, match="'gpt2': is not in the cache of tiktoken.*gpt2:DIRECTORY"):
    data.make_tokenizer('gpt2')


def test_gpt2_from_the_cache_asks_no_network(monkeypatch, tmp_path, folder, tokenizer):
  import tiktoken
  from tiktoken.load import data_gym_to_mergeable_bpe_ranks
  asked = []
  monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))
  monkeypatch.setattr(online, 'reachable', asked.append)
  ranks = data_gym_to_mergeable_bpe_ranks(str(folder / 'vocab.bpe'), str(folder / 'encoder.json'))
  monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: tiktoken.Encoding(
      name, pat_str='.', mergeable_ranks=ranks, special_tokens={'<|endoftext|>': 999}))
  # tiktoken names a cached file by the sha1 of the address it came from.
  for name in ('6d1cbeee0f20b3d9449abfede4726ed8212e3aee',
               '6c7ea1a7e38e3a7f062df639a5b80947f075ffe6'):
    (tmp_path / name).touch()
  assert data.make_tokenizer('gpt2').fingerprint == tokenizer.fingerprint
  assert asked == []


@pytest.mark.parametrize(('name', 'part'), [
  ('gtp2', 'did you mean "gpt2"'), ('byte', 'did you mean "bytes"'),
  ('no/such.model', 'is no file'),
  ('ids', 'converted checkpoints'), ('gpt2:no/such', 'must hold vocab.bpe'), ('', 'is no file')])
def test_an_unknown_name(name, part):
  with pytest.raises(UserError) as caught:
    data.make_tokenizer(name)
  assert part in str(caught.value) and f'data.tokenizer={name!r}' in str(caught.value)


def test_without_tiktoken(monkeypatch, folder):
  monkeypatch.setattr(online.importlib.util, 'find_spec', lambda name: None)
  for name in ('gpt2', f'gpt2:{folder}'):
    with pytest.raises(UserError, match=r"needs the package tiktoken; .*aogpt_jax\[gpt2\]"):
      data.make_tokenizer(name)
