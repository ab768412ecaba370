"""Token ids to blocks on disk: ArrayRecord files of a fixed number of blocks, as TFDS reads them.

Every finished file stays. After each one, progress.json is replaced by what is needed to go on
behind it, so a call that was killed loses one file's work at most, and the files that it leaves
are the bytes of a call that was not killed.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterator

import numpy as np

from aogpt_jax.data.workers import Encoded
from aogpt_jax.errors import UserError

SHARD_TOKENS = 2**24  # tokens a file, rounded down to whole blocks
VERSION = '1.1.0'  # of the files: part of the request's hash, so a new one is prepared anew
SPLIT = 'blocks'  # TFDS wants a name for the only part
_NAME = 'packed_blocks'
_PROGRESS = 'progress.json'
_TEMPLATE = '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}'  # the number of files comes out last
log = logging.getLogger(__name__)


@dataclasses.dataclass
class PackingCounts:
  """What was consumed so far.

  Attributes:
    num_documents: documents, empty ones included.
    num_empty_documents: those of no ids, which are an end-of-text alone.
    num_tokens: ids of the documents with one end-of-text each.
    num_bytes: UTF-8 bytes of the documents.
    num_words: words of the documents, parted by white space.
  """

  num_documents: int = 0
  num_empty_documents: int = 0
  num_tokens: int = 0
  num_bytes: int = 0
  num_words: int = 0


@dataclasses.dataclass
class Progress:
  """The end of the last finished file.

  Attributes:
    request: hash of what the blocks are made of and of how files are cut.
    counts: of the documents that end before it.
    offset: tokens of the next document that lie before it.
    shard_bytes: size of each finished file.
    token_counts: how often each id occurs in them, int64 (vocab_size,).
    seconds: spent so far.
  """

  request: str
  counts: PackingCounts
  offset: int
  shard_bytes: list[int]
  token_counts: np.ndarray
  seconds: float


def start(request: str, vocab_size: int) -> Progress:
  """The progress of a call that begins."""
  return Progress(request, PackingCounts(), 0, [], np.zeros((vocab_size,), np.int64), 0.0)


def save_progress(target: pathlib.Path, progress: Progress) -> None:
  """Replaces the file; a reader sees the old one or the new one."""
  values = dataclasses.asdict(progress) | {'token_counts': progress.token_counts.tolist()}
  text = json.dumps(values)
  unfinished = target / f'{_PROGRESS}.tmp'
  unfinished.write_text(f'{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n')
  _sync(unfinished)
  os.replace(unfinished, target / _PROGRESS)


def load_progress(target: pathlib.Path, request: str) -> Progress | None:
  """Where an earlier call stopped; None if there is nothing to go on from.

  That is also so, and logged, if progress.json is damaged or the files are not those it names:
  their bytes cannot be trusted then.
  """
  try:
    digest, _, text = (target / _PROGRESS).read_bytes().partition(b'\n')
  except OSError:
    return None
  if hashlib.sha256(text.rstrip(b'\n')).hexdigest().encode() != digest:
    log.warning('%s is damaged: starting over', target / _PROGRESS)
    return None
  values = json.loads(text)
  if values['request'] != request:
    return None
  for index, size in enumerate(values['shard_bytes']):
    path = shard_path(target, index)
    if not path.exists() or path.stat().st_size != size:
      log.warning('%s is missing or not as it was written: starting over', path)
      return None
  return Progress(**values | {'counts': PackingCounts(**values['counts']),
                              'token_counts': np.array(values['token_counts'], np.int64)})


def remove_progress(target: pathlib.Path) -> None:
  """The data is complete."""
  (target / _PROGRESS).unlink(missing_ok=True)


def folder(target: pathlib.Path) -> pathlib.Path:
  """Where TFDS looks for the files."""
  return target / _NAME / VERSION


def shard_path(target: pathlib.Path, index: int) -> pathlib.Path:
  return folder(target) / f'{_NAME}-{SPLIT}.array_record-{index:05d}'


class ShardWriter:
  """Cuts ids into blocks and blocks into files.

  Attributes:
    counts: of all documents so far.
    num_blocks: written so far.
    progress: the end of the last finished file.
  """

  def __init__(self, target: pathlib.Path, block_length: int, progress: Progress,
               clock: Callable[[], float]):
    """Continues at `progress`: the documents to `add` begin behind progress.counts.

    Args:
      target: directory of the files; made when the first block is written.
      block_length: tokens a block.
      progress: where to begin.
      clock: gives the seconds spent on these files so far.
    """
    self._target = target
    self._length = block_length
    self._clock = clock
    self._shard_blocks = shard_blocks(block_length)
    self._skip = progress.offset
    self._rest = np.empty((0,), np.int32)
    self._file: _File | None = None
    self.progress = progress
    self.token_counts = progress.token_counts.copy()
    self.counts = dataclasses.replace(progress.counts)
    self.num_blocks = len(progress.shard_bytes) * self._shard_blocks

  def add(self, encoded: Encoded) -> None:
    """Writes the blocks that some documents fill up; keeps the tokens behind the last one."""
    tokens = np.concatenate([self._rest, encoded.ids[self._skip:]])
    self._skip = 0
    full = tokens.size // self._length * self._length
    blocks, self._rest = tokens[:full].reshape(-1, self._length), tokens[full:].copy()
    while len(blocks):
      room = self._shard_blocks - self.num_blocks % self._shard_blocks
      self._write(blocks[:room])
      if self.num_blocks % self._shard_blocks == 0:
        self._finish_shard()
        self._advance(encoded)
      blocks = blocks[room:]
    self.counts = _add(self.counts, encoded, len(encoded.num_tokens))

  def finish(self) -> list[int]:
    """Ends the last file; returns the sizes of all."""
    if self._file:
      self._finish_shard()
    return self.progress.shard_bytes

  def close(self) -> None:
    """Deletes the file that is unfinished, if there is one."""
    if self._file:
      self._file.discard()

  def _write(self, blocks: np.ndarray) -> None:
    if not self._file:
      self._file = _File(shard_path(self._target, len(self.progress.shard_bytes)))
    self._file.write(blocks)
    self.token_counts += np.bincount(blocks.reshape(-1), minlength=self.token_counts.size)
    self.num_blocks += len(blocks)

  def _finish_shard(self) -> None:
    self.progress.shard_bytes.append(self._file.finish())
    self._file = None

  def _advance(self, encoded: Encoded) -> None:
    """Saves that all blocks so far, which end within `encoded`, are in finished files."""
    ends = self.counts.num_tokens + np.cumsum(encoded.num_tokens)
    written = self.num_blocks * self._length
    whole = int(np.searchsorted(ends, written, side='right'))
    counts = _add(self.counts, encoded, whole)
    self.progress = dataclasses.replace(
        self.progress, counts=counts, offset=written - counts.num_tokens,
        token_counts=self.token_counts.copy(), seconds=self._clock())
    save_progress(self._target, self.progress)


def shard_blocks(block_length: int) -> int:
  """Blocks a file."""
  return max(1, SHARD_TOKENS // block_length)


def _add(counts: PackingCounts, encoded: Encoded, number: int) -> PackingCounts:
  """`counts` with the first `number` documents of `encoded`."""
  tokens = encoded.num_tokens[:number]
  return PackingCounts(counts.num_documents + number,
                       counts.num_empty_documents + int((tokens == 1).sum()),
                       counts.num_tokens + int(tokens.sum()),
                       counts.num_bytes + int(encoded.num_bytes[:number].sum()),
                       counts.num_words + int(encoded.num_words[:number].sum()))


def serialize(block: np.ndarray) -> bytes:
  """The tf.Example of a block int32 (n,)."""
  from tensorflow_datasets.proto import tf_example_pb2
  example = tf_example_pb2.Example()
  example.features.feature['tokens'].int64_list.value.extend(block.tolist())
  return example.SerializeToString()


class _File:
  """One ArrayRecord file of tf.Examples; it has its name only when it is complete."""

  def __init__(self, path: pathlib.Path):
    from array_record.python import array_record_module
    path.parent.mkdir(parents=True, exist_ok=True)
    self._path = path
    self._unfinished = path.with_name(f'unfinished-{path.name}')
    with _naming(path):
      # Random access reads single blocks, so they are not compressed in groups.
      self._writer = array_record_module.ArrayRecordWriter(str(self._unfinished), 'group_size:1')

  def write(self, blocks: np.ndarray) -> None:
    with _naming(self._path):
      for block in blocks:
        self._writer.write(serialize(block))

  def finish(self) -> int:
    """Returns the size of the file."""
    with _naming(self._path):
      self._writer.close()
    _sync(self._unfinished)
    os.replace(self._unfinished, self._path)
    return self._path.stat().st_size

  def discard(self) -> None:
    with contextlib.suppress(RuntimeError):
      self._writer.close()
    self._unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
  """The C++ writer's errors, such as a full disk, as one line."""
  try:
    yield
  except RuntimeError as error:
    raise UserError(f'{path}: cannot be written: {error}') from None


def _sync(path: pathlib.Path) -> None:
  """Waits for the disk: a name must not survive a power cut that its bytes do not."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())


def write_metadata(target: pathlib.Path, block_length: int, num_blocks: int,
                   shard_bytes: list[int]) -> None:
  """Writes what makes the folder a dataset of TFDS; TFDS prints a line or two."""
  import tensorflow_datasets as tfds
  full = shard_blocks(block_length)
  lengths = [min(full, num_blocks - start) for start in range(0, num_blocks, full)]
  template = tfds.core.ShardedFileTemplate(
      data_dir=folder(target), template=_TEMPLATE, dataset_name=_NAME, split=SPLIT,
      filetype_suffix='array_record')
  # np.int32, not 'int32', which needs TensorFlow, as check_data does.
  tokens = tfds.features.Tensor(shape=(block_length,), dtype=np.int32)
  tfds.folder_dataset.write_metadata(
      data_dir=folder(target), features=tfds.features.FeaturesDict({'tokens': tokens}),
      split_infos=[tfds.core.SplitInfo(SPLIT, lengths, sum(shard_bytes), template)],
      filename_template=template, check_data=False, disable_shuffling=True)
