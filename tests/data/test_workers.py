"""Ids from any number of processes are the same; no process is left, whatever happens."""

import itertools
import signal
import subprocess
import sys

import numpy as np
import pytest
import toy_tokenizers as toys

from aogpt_jax.data import workers
from aogpt_jax.errors import UserError

DOCUMENTS = [f'document {i} \u00e9' * (i % 5) for i in range(60)]


@pytest.fixture
def started(monkeypatch):
  """The processes that were started; others are started at once, for batches of a few texts."""
  monkeypatch.setattr(workers, 'POOL_AFTER', 0)
  monkeypatch.setattr(workers, 'BATCH_CHARACTERS', 100)
  processes = []
  real = subprocess.Popen

  def popen(*args, **options):
    processes.append(real(*args, **options))
    return processes[-1]

  monkeypatch.setattr(workers.subprocess, 'Popen', popen)
  return processes


def all_ended(processes):
  """Whether there were any and their end has been waited for, so that not even a zombie is left."""
  return bool(processes) and all(p.returncode is not None for p in processes)


@pytest.mark.parametrize('count', [1, 2, 3])
def test_ids_and_their_order_do_not_depend_on_the_number_of_processes(started, count):
  tokenizer = toys.SlowStartTokenizer()
  results = list(workers.encode_documents(DOCUMENTS, tokenizer, count))
  assert len(started) == (count if count > 1 else 0)
  assert len(results) > 5  # batches
  expected = [[*text.encode(), 256] for text in DOCUMENTS]
  ids = np.concatenate([r.ids for r in results])
  assert ids.dtype == np.int32
  assert ids.tolist() == list(itertools.chain(*expected))
  assert np.concatenate([r.num_tokens for r in results]).tolist() == list(map(len, expected))
  assert np.concatenate([r.num_bytes for r in results]).tolist() == [len(e) - 1 for e in expected]
  assert count == 1 or all_ended(started)


def test_batches_end_at_a_document_and_are_bounded(started):
  sizes = [len(r.num_tokens) for r in workers.encode_documents(
      ['x' * 60, 'y' * 39, 'z' * 1000, 'a', 'b'], toys.ByteTokenizer(), 1)]
  assert sizes == [2, 1, 2]


def test_only_a_few_batches_are_read_ahead(started):
  read = []

  def long():
    for number in range(1000):
      read.append(number)
      yield 'x' * 100

  results = workers.encode_documents(long(), toys.ByteTokenizer(), 2)
  next(results)
  assert len(read) < 20
  results.close()
  assert all_ended(started)


def test_a_small_corpus_starts_no_process(monkeypatch):
  monkeypatch.setattr(workers.subprocess, 'Popen', None)
  assert len(list(workers.encode_documents(DOCUMENTS, toys.ByteTokenizer(), 2))) == 1


def test_ids_beyond_16_bits(started):
  (result,) = workers.encode_documents(['ab'], toys.WideTokenizer(), 2)
  assert result.ids.tolist() == [100_097, 100_098, 100_256]
  assert result.ids.dtype == np.int32


@pytest.mark.parametrize('count', [1, 2])
def test_a_tokenizer_that_fails_is_one_error_with_the_number_of_the_document(started, count):
  documents = [*DOCUMENTS, 'bad', *DOCUMENTS]
  message = '^document 71 of the corpus: the tokenizer failed: LookupError: no such piece$'
  with pytest.raises(UserError, match=message):
    list(workers.encode_documents(documents, toys.FailingTokenizer(), count, first=11))
  assert count == 1 or all_ended(started)


def test_ids_outside_the_vocabulary(started):
  with pytest.raises(UserError, match=r'document 2 .* the ids 97 to 122; valid: 0 to 99'):
    list(workers.encode_documents(['a', 'az'], toys.OutsideTokenizer(), 1))


@pytest.mark.parametrize('count', [2, 3])
def test_a_worker_that_is_killed_is_one_line_and_no_hang(started, count):
  documents = [*DOCUMENTS, 'bad', *DOCUMENTS]
  with pytest.raises(UserError, match='was killed by SIGKILL, as the system does when memory runs'):
    list(workers.encode_documents(documents, toys.DyingTokenizer(), count))
  assert all_ended(started)


def test_an_error_of_the_reader_comes_through(started):
  def failing():
    yield from DOCUMENTS
    raise UserError('a.jsonl, line 61: bad')

  with pytest.raises(UserError, match='^a.jsonl, line 61: bad$'):
    list(workers.encode_documents(failing(), toys.ByteTokenizer(), 2))
  assert all_ended(started)


def test_a_tokenizer_that_cannot_be_sent(started):
  class Local(toys.ByteTokenizer):
    pass

  for tokenizer in (Local(), toys.UnloadableTokenizer()):
    with pytest.raises(UserError, match='cannot be sent to other processes .* data.workers=1'):
      list(workers.encode_documents(DOCUMENTS, tokenizer, 2))
  assert all_ended(started)


# Not guarded by `if __name__ == '__main__'`: a notebook or a short script is not, either.
KILLED = '''
import os, signal, sys
sys.path.insert(0, {tests!r})
import toy_tokenizers
from aogpt_jax.data import workers
workers.POOL_AFTER = 0
workers.BATCH_CHARACTERS = 100
results = workers.encode_documents(('x' * 100 for _ in range(10**9)),
                                   toy_tokenizers.ByteTokenizer(), 2)
for number, result in enumerate(results):
  if number == 20:
    os.kill(os.getpid(), signal.SIGKILL)
'''


def test_workers_end_with_a_caller_that_is_killed(request):
  """All of them hold its stderr: reading that ends only when they have."""
  process = subprocess.Popen(
      [sys.executable, '-c', KILLED.format(tests=str(request.path.parent))],
      stderr=subprocess.PIPE, text=True)
  _, error = process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL, error
  assert error == ''


def test_the_number_of_cores_is_that_of_this_process(monkeypatch):
  monkeypatch.setattr(workers.os, 'sched_getaffinity', lambda pid: {0, 5, 6}, raising=False)
  assert workers.count_cores() == 3
