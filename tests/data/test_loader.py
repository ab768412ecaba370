"""The same batches for any number of hosts, from any start, each epoch whole."""

import gc
import itertools
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from aogpt_jax.data import loader
from aogpt_jax.errors import UserError

NUM_BLOCKS = 50
BLOCKS = np.arange(NUM_BLOCKS * 4, dtype=np.int32).reshape(NUM_BLOCKS, 4)


def take(count, global_batch=8, seed=0, blocks=BLOCKS, **options):
  batches = loader.train_batches(blocks, global_batch, seed, **options)
  taken = np.stack(list(itertools.islice(batches, count)))
  batches.close()
  return taken


def test_every_epoch_holds_every_block_once_in_an_order_of_its_own():
  batches = take(25)  # 4 epochs: 200 rows
  assert batches.dtype == np.int32
  assert batches.shape == (25, 8, 4)
  np.testing.assert_array_equal(batches[..., 1:], batches[..., :1] + [1, 2, 3])
  epochs = batches[..., 0].reshape(4, NUM_BLOCKS) // 4
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(NUM_BLOCKS))
    assert (epoch != np.arange(NUM_BLOCKS)).any()
  assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize('hosts', [
  [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 5, 6], [1, 3, 4, 7]]])
def test_global_batches_do_not_depend_on_the_hosts(hosts):
  """Whole runs of rows, as a rule; a mesh may also deal out others."""
  whole = take(30)
  for rows in hosts:
    np.testing.assert_array_equal(take(30, rows=rows), whole[:, rows])


def test_the_blocks_of_a_batch_are_known_by_their_numbers():
  """Of any batch, over the end of an epoch, for a host that reads some of the rows alone."""
  whole = take(9)
  batches = loader.train_batches(BLOCKS, 8, 0, rows=[3])
  for step in (0, 6, 8):
    assert batches.block_indices(step) == (whole[step, :, 0] // 4).tolist()
  batches.close()


def test_a_stalled_input_is_reported(caplog):
  """Once every stall_seconds, with what the queue holds; and not while batches come."""
  go = threading.Event()

  class Stuck:
    def __len__(self):
      return NUM_BLOCKS

    def __getitem__(self, index):
      go.wait(30)
      return BLOCKS[index]

  batches = loader.train_batches(Stuck(), 8, 0, start=5, stall_seconds=0.3)
  threading.Timer(0.75, go.set).start()
  next(batches)
  lines = [r.getMessage() for r in caplog.records if 'stalled' in r.getMessage()]
  assert 1 <= len(lines) <= 2
  assert 'batch 5 has not come for 0 s; since the start, ' in lines[0]
  assert ' begun, 0 read, 0 handed out' in lines[0]
  next(batches)
  assert len([r for r in caplog.records if 'stalled' in r.getMessage()]) == len(lines)
  batches.close()


@pytest.mark.parametrize('start', [0, 1, 6, 7, 23])
def test_resuming_continues_exactly_with_another_number_of_hosts(start):
  whole = take(40)
  np.testing.assert_array_equal(take(40 - start, start=start), whole[start:])
  second = take(40 - start, start=start, rows=range(4, 8))
  np.testing.assert_array_equal(second, whole[start:, 4:])


def test_the_state_counts_what_was_handed_out_not_what_was_prefetched():
  batches = loader.train_batches(BLOCKS, 8, 0, start=5)
  assert batches.state == 5
  for _ in range(3):
    next(batches)
  following = next(batches)
  assert batches.state == 9
  batches.close()
  np.testing.assert_array_equal(take(1, start=8)[0], following)


def test_a_far_start_is_not_replayed():
  class Counting:
    reads = 0

    def __len__(self):
      return NUM_BLOCKS

    def __getitem__(self, index):
      Counting.reads += 1
      return BLOCKS[index]

  take(1, blocks=Counting(), start=10**9, prefetch=2)
  assert Counting.reads < 100


def test_threads_and_prefetch_do_not_change_the_batches_but_the_seed_does():
  np.testing.assert_array_equal(take(20, num_threads=4, prefetch=3), take(20, num_threads=1))
  assert (take(2, seed=1) != take(2, seed=0)).any()


@pytest.mark.parametrize('batched', [True, False])
def test_blocks_are_read_in_one_call_where_they_can_be(batched):
  calls = []

  class Source:
    def __len__(self):
      return NUM_BLOCKS

    def __getitem__(self, index):
      calls.append(1)
      return BLOCKS[index]

    if batched:
      def __getitems__(self, indices):
        calls.append(len(indices))
        return [BLOCKS[i] for i in indices]

  np.testing.assert_array_equal(take(3, blocks=Source()), take(3))
  assert set(calls) == {8 if batched else 1}


@pytest.mark.parametrize(('options', 'line'), [
  ({'global_batch': 0}, 'global_batch = 0 must be .* nearest valid is 1'),
  ({'global_batch': 51}, '50 blocks, fewer than global_batch = 51'),
  ({'rows': [7, 8]}, r'rows = \[7, 8\] must be some of the rows 0 to 7'),
  ({'rows': []}, r'rows = \[\] must be some'),
  ({'seed': -1}, 'seed = -1 .* nearest valid is 0'),
  ({'seed': 2**32}, 'seed = 4294967296 .* nearest valid is 4294967295'),
  ({'start': -1}, 'start = -1 must be at least 0'),
])
def test_impossible_requests_are_one_line(options, line):
  with pytest.raises(UserError, match=line):
    loader.train_batches(BLOCKS, **{'global_batch': 8, 'seed': 0, **options})


def test_a_batch_as_large_as_the_data_is_one_epoch():
  batches = take(2, global_batch=NUM_BLOCKS)
  np.testing.assert_array_equal(np.sort(batches[..., 0]), np.tile(BLOCKS[:, 0], (2, 1)))


def test_the_reader_is_closed_when_the_iterator_is_collected():
  batches = loader.train_batches(BLOCKS, 8, 0)
  next(batches)
  inner, alive = batches._batches, weakref.ref(batches)
  del batches
  gc.collect()
  assert alive() is None
  with pytest.raises(ValueError, match='closed'):
    next(inner)


def test_a_reading_error_reaches_the_caller():
  class Broken:
    def __len__(self):
      return NUM_BLOCKS

    def __getitem__(self, index):
      raise OSError('disk on fire')

  with pytest.raises(OSError, match='disk on fire'):
    take(1, blocks=Broken())


def test_nothing_is_printed_at_exit_with_an_open_iterator():
  code = ('import numpy as np\nfrom aogpt_jax.data import loader\n'
          'batches = loader.train_batches(np.zeros((50, 4), np.int32), 8, 0)\n'
          'print(next(batches).shape)')
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert (result.stdout, result.stderr) == ('(8, 4)\n', '')


@pytest.mark.parametrize('batch_size', [1, 7, 50, 64])
def test_evaluation_sees_every_block_once_in_order(batch_size):
  tokens, weights, index = map(np.stack, zip(*loader.eval_batches(BLOCKS, batch_size), strict=True))
  assert (tokens.dtype, weights.dtype, index.dtype) == (np.int32, np.float32, np.int32)
  assert tokens.shape == (-(-NUM_BLOCKS // batch_size), batch_size, 4)
  np.testing.assert_array_equal(tokens, BLOCKS[index])  # padding rows too are real rows
  np.testing.assert_array_equal(index[weights == 1], np.arange(NUM_BLOCKS))
  padding = -NUM_BLOCKS % batch_size
  assert (weights == 0).sum() == padding
  assert weights.reshape(-1)[NUM_BLOCKS:].tolist() == [0] * padding


def test_evaluation_reads_the_rows_of_a_host_alone():
  """Rows that repeat the last block included; every host gets as many batches."""
  whole = list(loader.eval_batches(BLOCKS, 16))
  for rows in ([0, 1, 2, 3], [1, 5, 14, 15]):
    part = list(loader.eval_batches(BLOCKS, 16, np.array(rows)))
    assert len(part) == len(whole) == 4
    for (want, *same), (got, *also) in zip(whole, part, strict=True):
      np.testing.assert_array_equal(got, want[rows])
      np.testing.assert_array_equal(same, also)


def test_evaluation_mistakes_are_refused_at_the_call():
  with pytest.raises(UserError, match='batch_size = 0 must be at least 1'):
    loader.eval_batches(BLOCKS, 0)
  with pytest.raises(UserError, match='0 blocks'):
    loader.eval_batches(BLOCKS[:0], 4)
