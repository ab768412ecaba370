"""Blocks to batches.

Training batches are a function of (seed, global batch size, index of the batch) alone: any number
of hosts sees the same global batches, and the whole state of the loader is one integer, the number
of batches consumed.
"""

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from aogpt_jax.data.packing import Rows
from aogpt_jax.errors import UserError

log = logging.getLogger(__name__)


class _Reader:
  """Reads blocks in Grain's threads, and counts what is under way."""

  def __init__(self, blocks: Rows):
    self._blocks = blocks
    self._lock = threading.Lock()
    self.begun = self.done = 0

  def __call__(self, indices: np.ndarray) -> np.ndarray:
    with self._lock:
      self.begun += 1
    batch = np.stack(_read(self._blocks, indices.tolist()))
    with self._lock:
      self.done += 1
    return batch


class BatchIterator:
  """An endless iterator over this host's rows of every global batch.

  Attributes:
    state: batches handed out so far, counted from the beginning of training; the `start` that
      continues from here. Batches that are only prefetched do not count.
  """

  def __init__(self, batches: Iterator[np.ndarray], start: int, reader: _Reader,
               shuffled: Sequence[int], global_batch: int, stall_seconds: float):
    """See `train_batches`; `shuffled` holds the block of every row of every batch, in order."""
    self._batches = batches
    self.state = start
    self._start = start
    self._reader = reader
    self._shuffled = shuffled
    self._global_batch = global_batch
    self._stall_seconds = stall_seconds
    # Grain's threads outlive the iterator and print an error at exit unless it is closed.
    self._finalizer = weakref.finalize(self, batches.close)

  def __iter__(self) -> 'BatchIterator':
    return self

  def __next__(self) -> np.ndarray:
    """Returns int32 (this host's rows, block_length); logs a line if it is long in coming."""
    with _ticking(self._stall_seconds, self._log_stall):
      batch = next(self._batches)
    self.state += 1
    return batch

  def _log_stall(self, seconds: float) -> None:
    reader = self._reader
    log.warning('the input has stalled: batch %d has not come for %.0f s; since the start, '
                '%d batches were begun, %d read, %d handed out (is the disk of the data slow, or '
                'its server away?)', self.state, seconds, reader.begun, reader.done,
                self.state - self._start)

  def block_indices(self, batch: int) -> list[int]:
    """The blocks of all rows of global batch `batch` (0 is the first of the run), in order."""
    first = batch * self._global_batch
    return [int(self._shuffled[first + row]) for row in range(self._global_batch)]

  def close(self) -> None:
    """Stops the reading threads; also happens when the iterator is collected and at exit."""
    self._finalizer()


@contextlib.contextmanager
def _ticking(every: float, tick: Callable[[float], None]) -> Iterator[None]:
  """Calls tick(seconds so far) every `every` seconds, in a thread, until the block ends."""
  begin, over = time.monotonic(), threading.Event()

  def wait():
    while not over.wait(every):
      tick(time.monotonic() - begin)
  thread = threading.Thread(target=wait, daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def train_batches(blocks: Rows, global_batch: int, seed: int, *, rows: np.ndarray | None = None,
                  start: int = 0, num_threads: int = 2, prefetch: int = 16,
                  stall_seconds: float = 60.0) -> BatchIterator:
  """Iterates over shuffled batches, without end.

  Every epoch holds every block once, in an order of its own. Epochs follow each other without a
  gap: a batch may hold the last blocks of one and the first of the next, so none is dropped.

  Args:
    blocks: random access to int32 (block_length,), at least global_batch of them.
    global_batch: rows of a batch over all hosts.
    seed: of the shuffle, in [0, 2**32).
    rows: numbers of the rows of every global batch that this host reads, from
      `sharding.host_rows`; None: all.
    start: batches already consumed. Reading goes on behind them, without replaying them, and may
      do so with other rows.
    num_threads: reading threads; the batches do not depend on it.
    prefetch: batches read ahead.
    stall_seconds: a batch that takes longer is reported in the log, again and again.

  Returns:
    A BatchIterator of int32 (len(rows), block_length).

  Raises:
    UserError: if there are fewer blocks than one global batch, or if an argument is out of its
      range.
  """
  rows = np.arange(global_batch) if rows is None else np.asarray(rows)
  _check(len(blocks), global_batch, seed, rows, start)
  import grain
  # Grain shuffles the indices only, so that the blocks of a batch are read in one call: Grain on
  # its own reads them one by one, ten times slower where a core is busy.
  shuffled = grain.MapDataset.range(len(blocks)).seed(seed).shuffle().repeat()
  # Only this host's rows of a batch are looked up, at 20 µs each; which they are does not depend
  # on the other hosts.
  batch_rows = lambda batch: np.array([shuffled[batch * global_batch + row] for row in rows])
  reader = _Reader(blocks)
  dataset = grain.MapDataset.range(sys.maxsize // global_batch).map(batch_rows).map(reader)
  batches = iter(dataset.to_iter_dataset(
      grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)))
  grain.experimental.set_next_index(batches, start)
  return BatchIterator(batches, start, reader, shuffled, global_batch, stall_seconds)


def _check(num_blocks: int, global_batch: int, seed: int, rows: np.ndarray, start: int) -> None:
  if global_batch < 1:
    raise UserError(f'global_batch = {global_batch} must be at least 1; the nearest valid is 1')
  if num_blocks < global_batch:
    raise UserError(f'the data has {num_blocks} blocks, fewer than global_batch = {global_batch}; '
                    'use a smaller batch, shorter blocks or more text')
  if not rows.size or not 0 <= rows.min() <= rows.max() < global_batch:
    raise UserError(f'rows = {rows.tolist()} must be some of the rows 0 to {global_batch - 1}')
  if not 0 <= seed < 2**32:
    raise UserError(f'seed = {seed} must be in [0, 2**32); the nearest valid is '
                    f'{min(max(seed, 0), 2**32 - 1)}')
  if start < 0:
    raise UserError(f'start = {start} must be at least 0; the nearest valid is 0')


def eval_batches(blocks: Rows, batch_size: int, rows: np.ndarray | None = None,
                 ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Iterates over every block once, in order.

  Args:
    blocks: random access to int32 (n,), at least one.
    batch_size: rows of every batch; the last one repeats its last row where blocks run out.
    rows: numbers of the rows of every batch that are read, increasing; None: all. Every host gets
      the same number of batches.

  Returns:
    An iterator of tokens int32 (len(rows), n), weights float32 (batch_size,), 1 for a block and
    0 for a repeated row, and index int32 (batch_size,), the row's number among the blocks.

  Raises:
    UserError: if batch_size < 1 or there are no blocks.
  """
  if batch_size < 1:
    raise UserError(f'batch_size = {batch_size} must be at least 1; the nearest valid is 1')
  if not len(blocks):
    raise UserError('the data has 0 blocks; at least 1 is needed to evaluate')
  return _eval_batches(blocks, batch_size, np.arange(batch_size) if rows is None else rows)


def _eval_batches(blocks: Rows, batch_size: int, rows: np.ndarray,
                  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  for start in range(0, len(blocks), batch_size):
    wanted = np.arange(start, start + batch_size)
    index = np.minimum(wanted, len(blocks) - 1)
    wanted_here, copies = np.unique(index[rows], return_counts=True)  # the last row repeats
    tokens = np.repeat(np.stack(_read(blocks, wanted_here.tolist())), copies, axis=0)
    yield (tokens.astype(np.int32, copy=False), (wanted == index).astype(np.float32),
           index.astype(np.int32))


def _read(blocks: Rows, indices: Sequence[int]) -> list[np.ndarray]:
  if hasattr(blocks, '__getitems__'):  # one call a batch reads in parallel
    return blocks.__getitems__(indices)
  return [blocks[i] for i in indices]
