"""Blocks to batches.

Training batches are a function of (seed, global batch size, index of the batch) alone: any number
of hosts sees the same global batches, and the whole state of the loader is one integer, the number
of batches consumed.
"""

import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from aogpt_jax.data.packing import Rows
from aogpt_jax.errors import UserError


class BatchIterator:
  """An endless iterator over this host's rows of every global batch.

  Attributes:
    state: batches handed out so far, counted from the beginning of training; the `start` that
      continues from here. Batches that are only prefetched do not count.
  """

  def __init__(self, batches: Iterator[np.ndarray], start: int):
    self._batches = batches
    self.state = start
    # Grain's threads outlive the iterator and print an error at exit unless it is closed.
    self._finalizer = weakref.finalize(self, batches.close)

  def __iter__(self) -> 'BatchIterator':
    return self

  def __next__(self) -> np.ndarray:
    """Returns int32 (global_batch // process_count, block_length)."""
    batch = next(self._batches)
    self.state += 1
    return batch

  def close(self) -> None:
    """Stops the reading threads; also happens when the iterator is collected and at exit."""
    self._finalizer()


def train_batches(blocks: Rows, global_batch: int, seed: int, *, process_index: int = 0,
                  process_count: int = 1, start: int = 0, num_threads: int = 2,
                  prefetch: int = 16) -> BatchIterator:
  """Iterates over shuffled batches, without end.

  Every epoch holds every block once, in an order of its own. Epochs follow each other without a
  gap: a batch may hold the last blocks of one and the first of the next, so none is dropped.

  Args:
    blocks: random access to int32 (block_length,), at least global_batch of them.
    global_batch: rows of a batch over all hosts.
    seed: of the shuffle, in [0, 2**32).
    process_index: this host; it gets rows [process_index, process_index + 1) *
      (global_batch // process_count) of every global batch.
    process_count: number of hosts.
    start: batches already consumed. Reading goes on behind them, without replaying them, and may
      do so with another process_count.
    num_threads: reading threads; the batches do not depend on it.
    prefetch: batches read ahead.

  Returns:
    A BatchIterator of int32 (global_batch // process_count, block_length).

  Raises:
    UserError: if global_batch is not divisible by process_count, if there are fewer blocks than
      one global batch, or if an argument is out of its range.
  """
  _check(len(blocks), global_batch, seed, process_index, process_count, start)
  import grain
  # Grain shuffles the indices only, so that the blocks of a batch are read in one call: Grain on
  # its own reads them one by one, ten times slower where a core is busy.
  dataset = grain.MapDataset.range(len(blocks)).seed(seed).shuffle().repeat()
  # Batch first, then take this host's part: the other way round the rows of a global batch would
  # depend on the number of hosts.
  dataset = dataset.batch(global_batch // process_count, drop_remainder=True)
  dataset = dataset[process_index::process_count]
  dataset = dataset.map(lambda indices: np.stack(_read(blocks, indices.tolist())))
  batches = iter(dataset.to_iter_dataset(
      grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch)))
  grain.experimental.set_next_index(batches, start)
  return BatchIterator(batches, start)


def _check(num_blocks: int, global_batch: int, seed: int, process_index: int, process_count: int,
           start: int) -> None:
  if global_batch < 1 or global_batch % process_count:
    nearest = max(1, round(global_batch / process_count)) * process_count
    raise UserError(f'global_batch = {global_batch} must be a positive multiple of the '
                    f'{process_count} processes; the nearest valid is {nearest}')
  if num_blocks < global_batch:
    raise UserError(f'the data has {num_blocks} blocks, fewer than global_batch = {global_batch}; '
                    'use a smaller batch, shorter blocks or more text')
  if not 0 <= process_index < process_count:
    raise UserError(f'process_index = {process_index} must be in [0, {process_count})')
  if not 0 <= seed < 2**32:
    raise UserError(f'seed = {seed} must be in [0, 2**32); the nearest valid is '
                    f'{min(max(seed, 0), 2**32 - 1)}')
  if start < 0:
    raise UserError(f'start = {start} must be at least 0; the nearest valid is 0')


def eval_batches(blocks: Rows, batch_size: int
                 ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Iterates over every block once, in order.

  Args:
    blocks: random access to int32 (n,), at least one.
    batch_size: rows of every batch; the last one repeats its last row where blocks run out.

  Returns:
    An iterator of tokens int32 (batch_size, n), weights float32 (batch_size,), 1 for a block and
    0 for a repeated row, and index int32 (batch_size,), the row's number among the blocks.

  Raises:
    UserError: if batch_size < 1 or there are no blocks.
  """
  if batch_size < 1:
    raise UserError(f'batch_size = {batch_size} must be at least 1; the nearest valid is 1')
  if not len(blocks):
    raise UserError('the data has 0 blocks; at least 1 is needed to evaluate')
  return _eval_batches(blocks, batch_size)


def _eval_batches(blocks: Rows, batch_size: int
                  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  for start in range(0, len(blocks), batch_size):
    wanted = np.arange(start, start + batch_size)
    index = np.minimum(wanted, len(blocks) - 1)
    rows = _read(blocks, range(start, int(index[-1]) + 1))
    tokens = np.stack(rows + rows[-1:] * (batch_size - len(rows)))
    yield (tokens.astype(np.int32, copy=False), (wanted == index).astype(np.float32),
           index.astype(np.int32))


def _read(blocks: Rows, indices: Sequence[int]) -> list[np.ndarray]:
  if hasattr(blocks, '__getitems__'):  # one call a batch reads in parallel
    return blocks.__getitems__(indices)
  return [blocks[i] for i in indices]
