"""Documents to token ids by several processes: the ids, and their order, do not depend on how many.

The calling process reads the documents and hands them out in batches; each worker is a Python
process of its own that is fed through its standard input, so that it ends when its feeder does,
even by kill -9. (Not multiprocessing: its workers import the caller's script anew, which must be
guarded for that, and outlive a caller that is killed.)
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from aogpt_jax.errors import UserError

BATCH_CHARACTERS = 2**20  # a batch ends with the document that reaches this
POOL_AFTER = 2**23  # characters that the calling process encodes before it starts others
_SERVE = 'from aogpt_jax.data import workers; workers.serve()'


class Tokenizer(Protocol):
  """What packing needs of a tokenizer, such as SentencePieceTokenizer."""

  vocab_size: int
  end_of_text_id: int
  fingerprint: str

  def encode(self, text: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Encoded:
  """The ids of some documents in a row.

  Attributes:
    ids: int32 (n,), of all documents, each with one end-of-text behind it.
    num_tokens: int64 (documents,), ids of each document with its end-of-text; they sum to n.
    num_bytes: int64 (documents,), UTF-8 bytes of each.
    num_words: int64 (documents,), words of each, parted by white space.
  """

  ids: np.ndarray
  num_tokens: np.ndarray
  num_bytes: np.ndarray
  num_words: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Batch:
  documents: list[str]
  first: int  # number of the first document, counted from 1
  num_characters: int


def count_cores() -> int:
  """Cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):  # a container or a Slurm job may own a part of them
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def encode_documents(documents: Iterable[str], tokenizer: Tokenizer, workers: int,
                     first: int = 1) -> Iterator[Encoded]:
  """Yields the ids of all documents, in order; close the iterator to end its processes early.

  Memory is bounded by a few batches a worker, plus the longest document.

  Args:
    documents: texts; what iterating over them raises comes through unchanged.
    tokenizer: gives the ids. With several workers it is pickled.
    workers: processes that encode. 1 is the calling process; more are started once the corpus
      turns out to be longer than POOL_AFTER, since starting them takes a part of a second.
    first: number of the first document, for messages.

  Raises:
    UserError: if the tokenizer fails on a document, or a worker process ends before its work.
  """
  batches = _batches(documents, first)
  num_characters = 0
  while workers == 1 or num_characters < POOL_AFTER:
    batch = next(batches, None)
    if batch is None:
      return
    num_characters += batch.num_characters
    yield _encode(batch, tokenizer)
  with _pool(tokenizer, workers) as submit:
    pending: collections.deque[concurrent.futures.Future] = collections.deque()
    for batch in batches:
      pending.append(submit(batch))
      if len(pending) > 2 * workers + 2:  # workers stay busy while the caller writes a result
        yield pending.popleft().result()
    while pending:
      yield pending.popleft().result()


def _batches(documents: Iterable[str], first: int) -> Iterator[_Batch]:
  batch: list[str] = []
  num_characters = 0
  for document in documents:
    batch.append(document)
    num_characters += len(document) + 1
    if num_characters >= BATCH_CHARACTERS:
      yield _Batch(batch, first, num_characters)
      first, batch, num_characters = first + len(batch), [], 0
  if batch:
    yield _Batch(batch, first, num_characters)


def _encode(batch: _Batch, tokenizer: Tokenizer) -> Encoded:
  end_of_text = np.asarray([tokenizer.end_of_text_id], np.int32)
  pieces: list[np.ndarray] = []
  for number, document in enumerate(batch.documents, start=batch.first):
    try:
      ids = np.asarray(tokenizer.encode(document))
    except UserError as error:
      raise UserError(f'document {number} of the corpus: {error}') from None
    except Exception as error:
      raise UserError(f'document {number} of the corpus: the tokenizer failed: '
                      f'{type(error).__name__}: {" ".join(str(error).split())}') from error
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
      raise UserError(f'document {number} of the corpus: the tokenizer gave the ids {ids.min()} to '
                      f'{ids.max()}; valid: 0 to {tokenizer.vocab_size - 1}')
    pieces += [ids, end_of_text]
  return Encoded(
      ids=np.concatenate(pieces, dtype=np.int32),
      num_tokens=np.array([ids.size + 1 for ids in pieces[::2]], np.int64),
      num_bytes=np.array([len(d.encode('utf-8')) for d in batch.documents], np.int64),
      num_words=np.array([len(d.split()) for d in batch.documents], np.int64))


class _Worker:
  """One process, and the two pipes to it."""

  def __init__(self, greeting: bytes):
    # What can be imported here can be imported there, in whatever way it came onto the path.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    self.process = subprocess.Popen(
        [sys.executable, '-c', _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {'PYTHONPATH': path})
    self._greeting = greeting

  def encode(self, batch: _Batch) -> Encoded:
    try:
      self.process.stdin.write(self._greeting)
      self._greeting = b''
      pickle.dump(batch, self.process.stdin, protocol=5)
      self.process.stdin.flush()
      reply = pickle.load(self.process.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):
      raise UserError(_death(self.process.wait())) from None
    if isinstance(reply, UserError):
      raise reply
    return reply

  def end(self) -> None:
    self.process.kill()  # it has nothing of its own to lose
    self.process.wait()


def _death(code: int) -> str:
  how = f'was killed by {signal.Signals(-code).name}' if code < 0 else f'ended with code {code}'
  hint = ', as the system does when memory runs out' if code == -signal.SIGKILL else ''
  return (f'a process that tokenizes {how}{hint}; the same call goes on from the last shard, and '
          'data.workers=1 starts no such processes')


@contextlib.contextmanager
def _pool(tokenizer: Tokenizer, workers: int,
          ) -> Iterator[Callable[[_Batch], concurrent.futures.Future]]:
  """Starts the processes and gives a function that sends them a batch; ends them all at exit."""
  try:
    # Twice: what fails to load must still be read to its end.
    greeting = pickle.dumps(pickle.dumps(tokenizer, protocol=5), protocol=5)
  except Exception as error:  # pickle passes on whatever an object's own methods raise
    raise UserError(_not_sent(error)) from error
  running: list[_Worker] = []
  idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

  def encode(batch: _Batch) -> Encoded:
    worker = idle.get()
    try:
      return worker.encode(batch)
    finally:
      idle.put(worker)

  # A thread waits for each process, so that no two of them can wait for each other's pipes.
  threads = concurrent.futures.ThreadPoolExecutor(workers)
  try:
    for _ in range(workers):
      running.append(_Worker(greeting))
      idle.put(running[-1])
    yield lambda batch: threads.submit(encode, batch)
  finally:
    for worker in running:
      worker.end()
    threads.shutdown(wait=True, cancel_futures=True)
    for worker in running:
      worker.process.stdout.close()
      with contextlib.suppress(OSError):  # what it did not read is still in the buffer
        worker.process.stdin.close()


def _not_sent(error: Exception) -> str:
  return (f'the tokenizer cannot be sent to other processes ({type(error).__name__}: {error}); '
          'define it in a module, or use data.workers=1')


def serve() -> None:
  """The whole life of a worker process: a tokenizer, then batches, until its input ends."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller decides
  requests = sys.stdin.buffer
  replies = os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)  # what a library prints must not get between the replies
  failure = None
  try:
    pickled = pickle.load(requests)
  except (EOFError, pickle.UnpicklingError):
    return
  try:
    tokenizer = pickle.loads(pickled)
  except Exception as error:
    failure = UserError(_not_sent(error))
  try:
    while True:
      batch = pickle.load(requests)
      try:
        reply = failure or _encode(batch, tokenizer)
      except UserError as error:
        reply = UserError(*error.args)  # without its cause, which may not pickle
      pickle.dump(reply, replies, protocol=5)
      replies.flush()
  except (EOFError, pickle.UnpicklingError, BrokenPipeError):  # the caller has ended
    os._exit(0)
