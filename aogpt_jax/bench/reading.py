"""Suites data and prepare: reading blocks against the step that waits for them, and packing."""

import pathlib
import tempfile
from collections.abc import Iterator

import jax
from array_record.python import array_record_module

from aogpt_jax import data, sharding as sharding_lib
from aogpt_jax.bench import measure, training
from aogpt_jax.bench.results import Table
from aogpt_jax.config import Config
from aogpt_jax.data import corpora, packing, shards, tokenizers, workers as workers_lib

BATCHES = 256  # of one timed run of the loader, started anew: what Grain reads ahead is in the time


def loader(config: Config, folder: pathlib.Path, tokenizer: tokenizers.ByteTokenizer,
           ) -> Iterator[Table]:
  """Batches as the training loop takes them, onto the device, against the training step.

  Args:
    config: data.train, batch and model.
    folder: where the blocks are written.
    tokenizer: of the blocks.
  """
  batch, length = config.train.batch_size, config.model.context_length
  prepared = data.prepare(folder, config.data.train, tokenizer, length, config.data.workers)
  sharding = sharding_lib.batch_sharding(training.one_device())
  rows = sharding_lib.host_rows(sharding, batch)
  blocks, begun = data.open_blocks(prepared), [0]

  def load() -> list[jax.Array]:
    batches = data.train_batches(blocks, batch, config.seed, rows=rows, start=begun[0])
    begun[0] += BATCHES
    found = [sharding_lib.global_array(next(batches), rows, sharding, batch)
             for _ in range(BATCHES)]
    batches.close()
    return found

  step = training.make_step(config, training.random_tokens(config, batch))
  times = measure.interleaved({'loader': load, 'training step': step.run})
  tokens = {'loader': BATCHES * batch * length, 'training step': batch * length}
  per_step = measure.ratio(times['training step'], times['loader'])
  scale = tokens['loader'] / tokens['training step']
  ratios = {'loader': measure.Ratio(*(scale * value for value in per_step)), 'training step': None}
  yield Table(
      f'Loader of {prepared.num_blocks:,} blocks of {length} tokens ({config.data.train}), '
      f'{BATCHES} batches of {batch} a run, against the training step that waits for them; median '
      '(range) of runs in turn', ('name', 'tokens_per_second', 'seconds', 'to_step', 'runs'),
      [measure.timed(name, timing) | measure.rates(timing, tokens[name])
       | measure.spread('to_step', ratios[name]) for name, timing in times.items()],
      ('A run starts the loader anew, and reads files that the system holds in memory.',))


def _plain_loop(path: pathlib.Path, corpus: str, tokenizer: tokenizers.ByteTokenizer,
                block_length: int) -> None:
  """What one would write without this package: the other side of `prepare`."""
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for block in packing.pack(corpora.read_documents(corpus), tokenizer, block_length):
    writer.write(shards.serialize(block))
  writer.close()


def prepare(config: Config, folder: pathlib.Path, tokenizer: tokenizers.ByteTokenizer,
            ) -> Iterator[Table]:
  """data.prepare on data.train against a plain loop over it; arguments as `loader`."""
  corpus, length = config.data.train, config.model.context_length
  workers = config.data.workers or workers_lib.count_cores()

  def plain_loop() -> None:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
      _plain_loop(pathlib.Path(inside) / 'blocks', corpus, tokenizer, length)

  def prepared() -> packing.PreparedData:
    with tempfile.TemporaryDirectory(dir=folder) as inside:
      return packing.prepare(inside, corpus, tokenizer, length, workers)

  size = prepared().num_bytes
  times = measure.interleaved({'plain loop': plain_loop, 'prepare': prepared}, warm_up=False)
  # prepare() starts others only when a corpus is longer than this.
  used = workers if size > workers_lib.POOL_AFTER else 1
  rows = [{'processes': processes, 'bytes_per_second': size / timing.median}
          | measure.timed(name, timing)
          | measure.spread('to_plain_loop', measure.ratio(times['plain loop'], timing))
          for (name, timing), processes in zip(times.items(), (1, used))]
  yield Table(f'{corpus}: {size / 1e6:,.1f} MB of text, {tokenizer.vocab_size} ids, blocks of '
              f'{length}; median (range) of {measure.REPEATS} runs in turn',
              ('name', 'processes', 'seconds', 'bytes_per_second', 'to_plain_loop', 'runs'), rows)


def both(config: Config, folder: pathlib.Path, tokenizer: tokenizers.ByteTokenizer,
         ) -> Iterator[Table]:
  """Suite data: `loader`, then `prepare`."""
  yield from loader(config, folder, tokenizer)
  yield from prepare(config, folder, tokenizer)
