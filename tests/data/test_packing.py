"""Blocks on disk: what is in them, and that a half-written set is never used."""

import dataclasses
import json
import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from toy_tokenizers import ByteTokenizer

from aogpt_jax.data import corpora, packing, tokenizers
from aogpt_jax.errors import UserError


@pytest.fixture
def corpus(tmp_path):
  path = tmp_path / 'texts' / 'a.jsonl'
  path.parent.mkdir()
  path.write_text(''.join(json.dumps({'text': f'document {i} \u00e9' * (i % 4)}) + '\n'
                          for i in range(50)))
  return f'files:{path}'


def blocks_of(corpus, block_length=16, tokenizer=ByteTokenizer()):  # noqa: B008
  return np.stack(list(packing.pack(corpora.read_documents(corpus), tokenizer, block_length)))


def test_pack_joins_documents_ends_each_and_drops_the_remainder():
  blocks = list(packing.pack(['abc', '', 'de', 'fghij'], ByteTokenizer(), 4))
  a, end = ord('a'), 256
  assert [block.tolist() for block in blocks] == [
      [a, a + 1, a + 2, end], [end, a + 3, a + 4, end], [a + 5, a + 6, a + 7, a + 8]]
  assert all(block.dtype == np.int32 for block in blocks)


def test_pack_is_lazy_and_checks_the_length_at_the_call():
  def endless():
    while True:
      yield 'abcdefg'

  assert next(packing.pack(endless(), ByteTokenizer(), 20)).shape == (20,)
  with pytest.raises(UserError, match='block_length = 0 must be at least 1'):
    packing.pack([], ByteTokenizer(), 0)


def test_prepared_blocks_are_the_packed_ones(corpus, tmp_path):
  prepared = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  expected = blocks_of(corpus)
  texts = list(corpora.read_documents(corpus))
  blocks = packing.open_blocks(prepared)
  assert len(blocks) == prepared.num_blocks == len(expected)
  assert blocks[3].dtype == np.int32
  np.testing.assert_array_equal([blocks[i] for i in range(len(blocks))], expected)
  np.testing.assert_array_equal(blocks.__getitems__([7, 0, 7]), expected[[7, 0, 7]])
  for index in [-1, len(expected)]:
    with pytest.raises(IndexError):
      blocks[index]
  num_bytes = sum(len(text.encode()) for text in texts)
  assert prepared.seconds > 0
  assert dataclasses.asdict(prepared) == {
    'num_empty_documents': 13, 'fresh': True, 'seconds': prepared.seconds,
    'directory': prepared.directory, 'corpus': corpus, 'block_length': 16, 'vocab_size': 257,
    'corpus_fingerprint': corpora.corpus_fingerprint(corpus), 'tokenizer_fingerprint': 'bytes',
    'num_blocks': (num_bytes + 50) // 16, 'num_documents': 50, 'num_tokens': num_bytes + 50,
    'num_bytes': num_bytes, 'num_words': sum(len(text.split()) for text in texts)}
  assert prepared.bytes_per_token == num_bytes / (num_bytes + 50)
  np.testing.assert_array_equal(prepared.token_counts,
                                np.bincount(expected.reshape(-1), minlength=257))
  assert packing.load_prepared(prepared.directory) == prepared


def test_the_same_request_reuses_the_files_even_when_moved(corpus, tmp_path, monkeypatch):
  first = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  monkeypatch.setattr(packing, '_build', None)  # building again would fail
  again = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  assert again == first
  assert (first.fresh, again.fresh) == (True, False)
  (tmp_path / 'data').rename(tmp_path / 'moved')
  moved = packing.prepare(tmp_path / 'moved', corpus, ByteTokenizer(), 16)
  np.testing.assert_array_equal(packing.open_blocks(moved)[5], blocks_of(corpus)[5])


def test_another_request_gets_files_of_its_own(corpus, tmp_path):
  class Other(ByteTokenizer):
    fingerprint = 'other'

  def prepare(tokenizer, block_length):
    return packing.prepare(tmp_path / 'data', corpus, tokenizer, block_length)

  made = [prepare(ByteTokenizer(), 16), prepare(Other(), 16), prepare(ByteTokenizer(), 8)]
  path = tmp_path / 'texts' / 'a.jsonl'
  path.write_text(path.read_text().replace('document', 'Document'))
  made.append(prepare(ByteTokenizer(), 16))
  assert len({prepared.directory for prepared in made}) == 4
  assert packing.open_blocks(made[0])[2].tolist() != packing.open_blocks(made[3])[2].tolist()


def test_an_error_midway_leaves_no_marker_and_comes_through(corpus, tmp_path, monkeypatch):
  texts = list(corpora.read_documents(corpus))

  def failing(spec):
    yield from texts[:30]
    raise UserError('line 31: bad')

  with monkeypatch.context() as patch:
    patch.setattr(packing.corpora, 'read_documents', failing)
    with pytest.raises(UserError, match='^line 31: bad$'):
      packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  assert not list((tmp_path / 'data').rglob('prepared.json'))
  prepared = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  assert prepared.num_documents == 50
  assert len(packing.open_blocks(prepared)) == len(blocks_of(corpus))


def test_files_without_the_marker_are_made_anew(corpus, tmp_path):
  prepared = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  counts = prepared.token_counts
  (prepared.directory / 'prepared.json').unlink()
  np.save(prepared.directory / 'token_counts.npy', counts * 0)
  again = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  assert again == prepared
  np.testing.assert_array_equal(again.token_counts, counts)


def test_two_calls_at_once_build_once(corpus, tmp_path, monkeypatch, caplog):
  caplog.set_level(logging.INFO, 'aogpt_jax')
  builds, results = [], []
  build = packing._build

  def slow(*arguments):
    builds.append(arguments)
    time.sleep(0.3)
    return build(*arguments)

  def prepare():
    results.append(packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16))

  monkeypatch.setattr(packing, '_build', slow)
  threads = [threading.Thread(target=prepare) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(builds) == 1
  assert 'another process is preparing it; waiting' in caplog.text
  assert len(results) == 2
  assert results[0] == results[1]


def test_too_little_text_names_both_numbers_and_writes_nothing(tmp_path):
  (tmp_path / 'a.txt').write_text('abc')
  corpus = f'files:{tmp_path}/a.txt'
  with pytest.raises(UserError, match='has 4 tokens, fewer than one block of block_length = 5'):
    packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 5)
  assert not [path for path in (tmp_path / 'data').iterdir() if path.is_dir()]
  assert packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 4).num_blocks == 1


def test_other_mistakes_are_user_errors(corpus, tmp_path):
  with pytest.raises(UserError, match='block_length = 0'):
    packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 0)
  with pytest.raises(UserError, match='unknown scheme'):
    packing.prepare(tmp_path / 'data', 'x:y', ByteTokenizer(), 16)
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match=r'/file: prepared data cannot be written here'):
    packing.prepare(tmp_path / 'file', corpus, ByteTokenizer(), 16)
  with pytest.raises(UserError, match=r'prepared.json: cannot be read \(No such file'):
    packing.load_prepared(tmp_path)
  (tmp_path / 'prepared.json').write_text('{"corpus": 1')
  with pytest.raises(UserError, match=r'prepared.json: cannot be read \(damaged\)'):
    packing.load_prepared(tmp_path)


@pytest.mark.parametrize('damage', ['missing', 'truncated', 'empty', 'fewer'])
def test_damaged_blocks_are_noticed_when_opened(corpus, tmp_path, damage):
  prepared = packing.prepare(tmp_path / 'data', corpus, ByteTokenizer(), 16)
  (records,) = prepared.directory.rglob('*.array_record*')
  if damage == 'missing':
    records.unlink()
  elif damage == 'fewer':
    prepared = dataclasses.replace(prepared, num_blocks=prepared.num_blocks + 1)
  else:
    data = records.read_bytes()
    records.write_bytes(data[:-100 if damage == 'truncated' else 0])
  with pytest.raises(UserError, match=f'delete {prepared.directory} and prepare the data again'):
    packing.open_blocks(prepared)


def test_preparing_and_opening_are_quiet(corpus, tmp_path, capfd):
  tokenizer = tokenizers.train_sentencepiece(corpora.read_documents(corpus), 280)
  prepared = packing.prepare(tmp_path / 'data', corpus, tokenizer, 16)
  np.testing.assert_array_equal(packing.open_blocks(prepared)[1],
                                blocks_of(corpus, tokenizer=tokenizer)[1])
  assert capfd.readouterr() == ('', '')


def test_no_tensorflow_and_no_info_lines_in_an_absl_program(corpus, tmp_path, request):
  code = f'''
import sys
from absl import app
sys.path.insert(0, {str(request.path.parent)!r})
def main(_):
  from aogpt_jax.data import packing
  from toy_tokenizers import ByteTokenizer
  prepared = packing.prepare({str(tmp_path / 'data')!r}, {corpus!r}, ByteTokenizer(), 16)
  packing.open_blocks(prepared)[0]
  assert not {{'tensorflow', 'torch'}} & set(sys.modules)
app.run(main)
'''
  result = subprocess.run([sys.executable, '-c', code, '--verbosity=0'], capture_output=True,
                          text=True, check=True)
  assert (result.stdout, result.stderr) == ('', '')
