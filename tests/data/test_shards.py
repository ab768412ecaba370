"""Files of blocks: the same bytes for any number of workers, and after a kill at any place."""

import gzip
import hashlib
import json
import logging
import signal
import subprocess
import sys

import numpy as np
import pytest
import toy_tokenizers as toys

from aogpt_jax import data
from aogpt_jax.data import corpora, packing, shards, workers
from aogpt_jax.errors import UserError

LENGTH = 16


@pytest.fixture
def small(monkeypatch):
  """Files of 4 blocks, batches of a few documents, workers from the beginning."""
  monkeypatch.setattr(shards, 'SHARD_TOKENS', 4 * LENGTH + 3)
  monkeypatch.setattr(workers, 'POOL_AFTER', 0)
  monkeypatch.setattr(workers, 'BATCH_CHARACTERS', 50)


@pytest.fixture
def corpus(tmp_path):
  """50 documents, 13 of them empty; number 30 fills several files by itself."""
  texts = [f'document {i} \u00e9' * (i % 4) for i in range(50)]
  texts[29] = ' '.join(map(str, range(100)))
  path = tmp_path / 'texts' / 'a.jsonl.gz'
  path.parent.mkdir()
  path.write_bytes(gzip.compress(
      ''.join(json.dumps({'text': text}) + '\n' for text in texts).encode()))
  return f'files:{path}'


def files_of(prepared):
  """The hash of every file but the marker, which holds a duration."""
  paths = (path for path in prepared.directory.rglob('*') if path.is_file())
  return {str(path.relative_to(prepared.directory)): hashlib.sha256(path.read_bytes()).hexdigest()
          for path in paths if path.name != 'prepared.json'}


def straight(corpus, tmp_path, count=1):
  return packing.prepare(tmp_path / f'straight{count}', corpus, toys.ByteTokenizer(), LENGTH, count)


def test_the_files_do_not_depend_on_the_number_of_workers(small, corpus, tmp_path):
  one = straight(corpus, tmp_path)
  names = sorted(files_of(one))
  assert names[0] == 'packed_blocks/1.1.0/dataset_info.json'
  assert names[2:] == [f'packed_blocks/1.1.0/packed_blocks-blocks.array_record-{i:05d}'
                       for i in range(-(-one.num_blocks // 4))] + ['token_counts.npy']
  for count in (2, 3):
    other = straight(corpus, tmp_path, count)
    assert other == packing.dataclasses.replace(one, directory=other.directory)
    assert files_of(other) == files_of(one)


def test_the_blocks_are_those_of_pack_and_tfds_reads_them(small, corpus, tmp_path):
  import tensorflow_datasets as tfds
  prepared = straight(corpus, tmp_path, 2)
  counts = packing.PackingCounts()
  expected = np.stack(list(packing.pack(
      corpora.read_documents(corpus), toys.ByteTokenizer(), LENGTH, counts)))
  source = tfds.builder_from_directory(shards.folder(prepared.directory)).as_data_source('blocks')
  np.testing.assert_array_equal([source[i]['tokens'] for i in range(len(source))], expected)
  blocks = data.open_blocks(prepared)
  np.testing.assert_array_equal(blocks.__getitems__(range(len(expected))), expected)
  np.testing.assert_array_equal(prepared.token_counts, np.bincount(expected.ravel(), minlength=257))
  assert (prepared.num_documents, prepared.num_empty_documents) == (50, 13)
  assert packing.PackingCounts(prepared.num_documents, prepared.num_empty_documents,
                               prepared.num_tokens, prepared.num_bytes,
                               prepared.num_words) == counts
  batch = next(data.train_batches(blocks, len(expected), 0))  # through Grain: each block once
  assert sorted(batch.tolist()) == sorted(expected.tolist())


def test_ids_beyond_16_bits_are_kept(corpus, tmp_path):
  prepared = packing.prepare(tmp_path, corpus, toys.WideTokenizer(), LENGTH)
  blocks = data.open_blocks(prepared)
  assert blocks[0].max() > 2**16
  assert prepared.token_counts.dtype == np.int64


# Kills itself with SIGKILL when save_progress is called for the NUMBERth time (before or after it
# has written), or before prepared.json is written.
KILLED = '''
import os, signal, sys
sys.path.insert(0, {tests!r})
import toy_tokenizers
from aogpt_jax.data import packing, shards, workers
shards.SHARD_TOKENS = {shard_tokens}
workers.POOL_AFTER = 0
workers.BATCH_CHARACTERS = 50
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
save, calls = shards.save_progress, []
def dying(*arguments):
  calls.append(arguments)
  if {where!r} == 'before' and len(calls) == {number}:
    die()
  save(*arguments)
  if {where!r} == 'after' and len(calls) == {number}:
    die()
shards.save_progress = dying
if {where!r} == 'marker':
  packing.np.save = lambda *arguments: die()
packing.prepare({directory!r}, {corpus!r}, toy_tokenizers.ByteTokenizer(), {length}, {count})
'''


def kill(corpus, directory, where, number=0, count=1, tests=''):
  code = KILLED.format(tests=tests, shard_tokens=shards.SHARD_TOKENS, where=where, number=number,
                       directory=str(directory), corpus=corpus, length=LENGTH, count=count)
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
  assert result.returncode == -signal.SIGKILL, result.stderr
  assert not list(directory.rglob('prepared.json'))


@pytest.mark.parametrize(('where', 'number', 'count'), [
    ('before', 1, 1), ('after', 1, 2), ('before', 11, 2), ('after', 11, 1), ('marker', 0, 1)])
def test_after_a_kill_the_files_are_the_same_bytes(small, corpus, tmp_path, request, monkeypatch,
                                                   where, number, count):
  """The 11th file ends within document 30."""
  expected = straight(corpus, tmp_path)
  kill(corpus, tmp_path / 'killed', where, number, count, str(request.path.parent))
  (directory,) = (path for path in (tmp_path / 'killed').iterdir() if path.is_dir())
  kept = sorted(directory.rglob('*array_record-*'))[:number - (where == 'before')]
  before = [path.stat().st_mtime_ns for path in kept]
  encoded = []
  encode = toys.ByteTokenizer.encode
  monkeypatch.setattr(toys.ByteTokenizer, 'encode',
                      lambda self, text: encoded.append(text) or encode(self, text))
  prepared = packing.prepare(tmp_path / 'killed', corpus, toys.ByteTokenizer(), LENGTH)
  assert prepared == packing.dataclasses.replace(expected, directory=directory)
  assert files_of(prepared) == files_of(expected)
  if (where, number) != ('before', 1):  # then there was no file to go on from
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert len(encoded) < 50
  if (where, number) == ('after', 11):
    assert len(encoded) == 21  # documents 30 to 50


def test_after_an_error_the_next_call_goes_on(small, corpus, tmp_path, monkeypatch, caplog):
  caplog.set_level(logging.INFO, 'aogpt_jax')
  real = corpora.read_documents

  def failing(spec):
    yield from [*real(spec)][:40]
    raise UserError('line 41: bad')

  with monkeypatch.context() as patch:
    patch.setattr(packing.corpora, 'read_documents', failing)
    with pytest.raises(UserError, match='^line 41: bad$'):
      packing.prepare(tmp_path / 'data', corpus, toys.ByteTokenizer(), LENGTH)
  assert not list((tmp_path / 'data').rglob('unfinished*'))
  prepared = packing.prepare(tmp_path / 'data', corpus, toys.ByteTokenizer(), LENGTH)
  assert 'going on behind document 3' in caplog.text
  assert files_of(prepared) == files_of(straight(corpus, tmp_path))


def interrupting(number):
  """A save_progress after whose NUMBERth call Ctrl-C comes."""
  save, calls = shards.save_progress, []

  def wrapped(*arguments):
    save(*arguments)
    calls.append(arguments)
    if len(calls) == number:
      raise KeyboardInterrupt

  return wrapped


@pytest.mark.parametrize('damage', ['flip', 'truncate', 'empty', 'shard', 'missing', 'size'])
def test_what_cannot_be_trusted_is_made_anew(small, corpus, tmp_path, caplog, damage, monkeypatch):
  expected = files_of(straight(corpus, tmp_path))
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(shards, 'save_progress', interrupting(9))
    packing.prepare(tmp_path / 'data', corpus, toys.ByteTokenizer(), LENGTH)
  (progress,) = (tmp_path / 'data').rglob('progress.json')
  shard = sorted((tmp_path / 'data').rglob('*array_record-*'))[3]
  content = progress.read_bytes()
  if damage == 'flip':
    assert content.count(b'"offset": ') == 1
    at = content.index(b'"offset": ') + 10
    progress.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])
  elif damage in ('truncate', 'empty'):
    progress.write_bytes(content[:-30] if damage == 'truncate' else b'')
  elif damage == 'shard':
    shard.write_bytes(shard.read_bytes()[:-1])
  elif damage == 'missing':
    shard.unlink()
  else:  # files of another size, by another version of the package
    monkeypatch.setattr(shards, 'SHARD_TOKENS', 3 * LENGTH)
    expected = files_of(straight(corpus, tmp_path / 'other'))
  prepared = packing.prepare(tmp_path / 'data', corpus, toys.ByteTokenizer(), LENGTH)
  assert ('starting over' in caplog.text) == (damage != 'size')
  assert len(data.open_blocks(prepared)) == prepared.num_blocks
  assert files_of(prepared) == expected


def test_a_dead_worker_leaves_finished_files_to_go_on_from(small, corpus, tmp_path, monkeypatch):
  """One line, and the same command goes on: nothing finished is lost."""
  corpus_path = tmp_path / 'bad.jsonl'
  corpus_path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in
                                 ['some text'] * 100 + ['bad'] + ['more text'] * 20))
  corpus, tokenizer = f'files:{corpus_path}', toys.DyingTokenizer()
  with pytest.raises(UserError, match='was killed by SIGKILL.*goes on from the last shard'):
    packing.prepare(tmp_path / 'data', corpus, tokenizer, LENGTH, 2)
  (progress,) = (tmp_path / 'data').rglob('progress.json')
  with pytest.raises(UserError, match='^document 101 of the corpus: the tokenizer failed'):
    packing.prepare(tmp_path / 'data', corpus, toys.FailingTokenizer(), LENGTH, 1)
  assert packing.prepare(tmp_path / 'data', corpus, tokenizer, LENGTH, 1).num_documents == 121
  assert not progress.exists()


def test_a_file_that_cannot_be_written_is_one_line(small, corpus, tmp_path, monkeypatch):
  path = shards.shard_path(tmp_path, 0)
  path.with_name(f'unfinished-{path.name}').mkdir(parents=True)
  writer = shards.ShardWriter(tmp_path, LENGTH, shards.start('', 257), lambda: 0.0)
  (encoded,) = workers.encode_documents(['x' * 40], toys.ByteTokenizer(), 1)
  with pytest.raises(UserError, match=f'{path}: cannot be written: '):
    writer.add(encoded)


def test_a_damaged_file_in_the_middle_is_noticed_when_opened(small, corpus, tmp_path):
  prepared = straight(corpus, tmp_path)
  path = shards.shard_path(prepared.directory, 2)
  path.write_bytes(path.read_bytes()[:-100])
  with pytest.raises(UserError, match=f'delete {prepared.directory} and prepare the data again'):
    data.open_blocks(prepared)
