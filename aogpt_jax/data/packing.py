"""Documents to blocks of token ids, on disk as ArrayRecord.

Blocks lie under `DIRECTORY/NAME-HASH/`, where HASH stands for the corpus, its bytes, the tokenizer
and the block length: another request never touches the files of this one.

  prepared.json          what was prepared; written last, so its presence means complete
  token_counts.npy       int64 (vocab_size,), how often each id occurs in the blocks
  packed_blocks/1.1.0/   the blocks, a dataset of TFDS (no TensorFlow involved)
  progress.json          while it is under way: where to go on after a kill, see `shards`
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from aogpt_jax.data import corpora, meter, shards, workers as workers_lib
from aogpt_jax.data.shards import PackingCounts
from aogpt_jax.data.workers import Tokenizer
from aogpt_jax.errors import UserError

_MARKER = 'prepared.json'
_COUNTS = 'token_counts.npy'
log = logging.getLogger(__name__)


class Rows(Protocol):
  """Random access to blocks: [i] is int32 (block_length,)."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class PreparedData:
  """Blocks on disk and what they were made of.

  Attributes:
    directory: where the files lie.
    corpus: the spec, as in `corpora`.
    corpus_fingerprint: sha256 (hex) of the corpus' bytes.
    tokenizer_fingerprint: sha256 (hex) of the tokenizer.
    vocab_size: number of ids.
    block_length: tokens a block.
    num_blocks: blocks on disk.
    num_documents: documents in the corpus.
    num_empty_documents: those without text, which are one end-of-text each.
    num_tokens: tokens of the corpus, with one end-of-text a document and with the remainder that
      fills no block.
    num_bytes: UTF-8 bytes of the documents.
    num_words: words of the documents, parted by white space.
    seconds: what preparing took, over all calls that it took.
    fresh: whether this call wrote it, rather than finding it.
  """

  directory: pathlib.Path
  corpus: str
  corpus_fingerprint: str
  tokenizer_fingerprint: str
  vocab_size: int
  block_length: int
  num_blocks: int
  num_documents: int
  num_empty_documents: int
  num_tokens: int
  num_bytes: int
  num_words: int
  seconds: float = dataclasses.field(compare=False)
  fresh: bool = dataclasses.field(default=False, compare=False)

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes a token: bits per byte = bits per token / this."""
    return self.num_bytes / self.num_tokens

  @property
  def token_counts(self) -> np.ndarray:
    """How often each id occurs in the blocks, int64 (vocab_size,)."""
    return np.load(self.directory / _COUNTS)


def pack(documents: Iterable[str], tokenizer: Tokenizer, block_length: int,
         counts: PackingCounts | None = None) -> Iterator[np.ndarray]:
  """Yields blocks int32 (block_length,) cut from the concatenated documents.

  Every document is its ids and one end-of-text; a block may hold several documents or a part of
  one. The last tokens, fewer than block_length, are dropped.

  Args:
    documents: texts.
    tokenizer: gives the ids.
    block_length: tokens a block, at least 1.
    counts: is kept up to date with what was consumed, if given.

  Raises:
    UserError: if block_length < 1.
  """
  if block_length < 1:
    raise UserError(f'block_length = {block_length} must be at least 1; the nearest valid is 1')
  return _pack(documents, tokenizer, block_length, counts or PackingCounts())


def _pack(documents: Iterable[str], tokenizer: Tokenizer, block_length: int,
          counts: PackingCounts) -> Iterator[np.ndarray]:
  end_of_text = np.asarray([tokenizer.end_of_text_id], np.int32)
  rest = np.empty((0,), np.int32)
  for document in documents:
    ids = tokenizer.encode(document)
    counts.num_documents += 1
    counts.num_empty_documents += ids.size == 0
    counts.num_tokens += ids.size + 1
    counts.num_bytes += len(document.encode('utf-8'))
    counts.num_words += len(document.split())
    rest = np.concatenate([rest, ids, end_of_text], dtype=np.int32)
    full = rest.size // block_length * block_length
    yield from rest[:full].reshape(-1, block_length)
    rest = rest[full:]


def prepare(directory: str | os.PathLike[str], corpus: str, tokenizer: Tokenizer,
            block_length: int, workers: int = 1) -> PreparedData:
  """Packs a corpus into blocks on disk, or finds them there from an earlier call.

  Memory is bounded, whatever the length of the corpus. A call that was killed, even by kill -9,
  leaves no prepared.json: the next one goes on behind the last file of blocks that it finished
  (`shards.SHARD_TOKENS` tokens each), to the same bytes. Two calls for the same blocks on one
  machine wait for each other and share them. `directory` must be on a file system with locks
  (flock).

  Args:
    directory: the blocks are put in a subdirectory of their own.
    corpus: a spec, see `corpora`.
    tokenizer: gives the ids; with several workers it is pickled.
    block_length: tokens a block.
    workers: processes that tokenize, at most; 0: one a core. The files do not depend on it, and
      a corpus of a few MB starts none.

  Raises:
    UserError: for a bad corpus, a block_length below 1, a corpus with fewer tokens than one block,
      a directory that cannot be written, a tokenizer that fails or a worker process that dies.
  """
  if block_length < 1:
    raise UserError(f'block_length = {block_length} must be at least 1; the nearest valid is 1')
  request = {
    'corpus': corpus,
    'corpus_fingerprint': corpora.corpus_fingerprint(corpus),
    'tokenizer_fingerprint': tokenizer.fingerprint,
    'vocab_size': tokenizer.vocab_size,
    'block_length': block_length,
  }
  digest = hashlib.sha256(json.dumps([shards.VERSION, request], sort_keys=True).encode())
  digest = digest.hexdigest()
  readable = re.sub(r'[^A-Za-z0-9]+', '-', corpus).strip('-')[-40:]
  target = pathlib.Path(directory).absolute() / f'{readable}-{block_length}-{digest[:12]}'
  with _exclusive(target):
    fresh = not (target / _MARKER).exists()
    if fresh:
      _build(target, request, tokenizer, workers or workers_lib.count_cores())
    return dataclasses.replace(load_prepared(target), fresh=fresh)


def load_prepared(directory: str | os.PathLike[str]) -> PreparedData:
  """Reads the prepared.json in a directory that `prepare` returned.

  Raises:
    UserError: if it is missing or damaged.
  """
  marker = pathlib.Path(directory) / _MARKER
  try:
    return PreparedData(directory=marker.parent, **json.loads(marker.read_text()))
  except (OSError, ValueError, TypeError) as error:
    reason = error.strerror if isinstance(error, OSError) else 'damaged'
    raise UserError(f'{marker}: cannot be read ({reason}); '
                    'delete its folder and prepare the data again') from None


def _build(target: pathlib.Path, request: dict, tokenizer: Tokenizer, workers: int) -> None:
  """Writes the files of a request, or the rest of them; the marker comes last."""
  corpus, block_length = request['corpus'], request['block_length']
  begin = time.monotonic()
  cut = hashlib.sha256(json.dumps([request, shards.shard_blocks(block_length)]).encode())
  progress = shards.load_progress(target, cut.hexdigest())
  if progress is None:
    shutil.rmtree(target, ignore_errors=True)  # what a killed call left
    progress = shards.start(cut.hexdigest(), tokenizer.vocab_size)
  else:
    log.info('packing %s: going on behind document %s', corpus,
             f'{progress.counts.num_documents:,}')
  begin -= progress.seconds
  writer = shards.ShardWriter(target, block_length, progress, lambda: time.monotonic() - begin)
  with contextlib.closing(writer), contextlib.closing(
      _encoded(corpus, tokenizer, workers, progress.counts)) as results:
    for encoded in results:
      writer.add(encoded)
    counts = writer.counts
    if not writer.num_blocks:
      raise UserError(f'corpus "{corpus}" has {counts.num_tokens} tokens, fewer than '
                      f'one block of block_length = {block_length}; '
                      f'the nearest valid block_length is {counts.num_tokens}')
    shard_bytes = writer.finish()
  with _quiet():
    shards.write_metadata(target, block_length, writer.num_blocks, shard_bytes)
  np.save(target / _COUNTS, writer.token_counts)
  record = {**request, 'num_blocks': writer.num_blocks, **dataclasses.asdict(counts),
            'seconds': time.monotonic() - begin}
  unfinished = target / f'{_MARKER}.tmp'
  unfinished.write_text(json.dumps(record, indent=2) + '\n')
  os.replace(unfinished, target / _MARKER)
  shards.remove_progress(target)


def _encoded(corpus: str, tokenizer: Tokenizer, workers: int, done: PackingCounts,
             ) -> Iterator[workers_lib.Encoded]:
  """The ids of the documents behind the first done.num_documents, with a bar or log lines."""
  documents = itertools.islice(corpora.read_documents(corpus), done.num_documents, None)
  total = meter.expected_bytes(corpora.corpus_files(corpus))
  results = workers_lib.encode_documents(documents, tokenizer, workers, done.num_documents + 1)
  with contextlib.closing(results):
    yield from meter.show(results, corpus, total, done.num_bytes)


@contextlib.contextmanager
def _exclusive(target: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a subdirectory; the system releases it even if the process is killed."""
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(target.with_name(f'.{target.name}.lock'), os.O_RDWR | os.O_CREAT)
  except OSError as error:
    raise UserError(f'{target.parent}: prepared data cannot be written here: '
                    f'{error.strerror}') from None
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      log.info('%s: another process is preparing it; waiting for that', target)
      fcntl.flock(lock, fcntl.LOCK_EX)
    yield
  finally:
    os.close(lock)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides what TFDS prints and logs at level INFO."""
  from absl import logging
  verbosity = logging.get_verbosity()
  logging.set_verbosity(min(verbosity, logging.WARNING))
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    logging.set_verbosity(verbosity)


def open_blocks(prepared: PreparedData) -> Rows:
  """Opens the blocks for random access: [i] is int32 (block_length,); it pickles.

  Raises:
    UserError: if the files are missing or hold another number of blocks.
  """
  import tensorflow_datasets as tfds
  folder = shards.folder(prepared.directory)
  advice = f'delete {prepared.directory} and prepare the data again'
  try:
    with _quiet():
      builder = tfds.builder_from_directory(folder)
      records = builder.as_data_source(
          split=shards.SPLIT, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
      found = len(records)
      lengths = builder.info.splits[shards.SPLIT].shard_lengths
      # A truncated file shows when it is first read.
      blocks = _Records(records, prepared.directory)
      blocks.__getitems__([end - 1 for end in itertools.accumulate(lengths)])
  except Exception as error:  # many types, from TFDS and from the C++ reader
    raise UserError(f'{folder}: the blocks are missing or damaged '
                    f'({type(error).__name__}); {advice}') from error
  if found != prepared.num_blocks:
    raise UserError(f'{folder}: holds {found} blocks, but prepared.json says '
                    f'{prepared.num_blocks}; {advice}')
  return blocks


class _Records:
  """Decodes the records itself: TFDS' general decoder takes several times longer a record."""

  def __init__(self, records: Sequence[bytes], directory: pathlib.Path):
    self._records = records
    self._directory = directory

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> np.ndarray:
    return self.__getitems__([index])[0]

  def __getitems__(self, indices: Sequence[int]) -> list[np.ndarray]:
    """Reads several blocks at once."""
    from tensorflow_datasets.proto import tf_example_pb2
    for index in indices:
      if not 0 <= index < len(self):
        raise IndexError(f'block {index} is outside 0 to {len(self) - 1}')
    try:
      records = self._records.__getitems__(indices)
    except RuntimeError as error:  # of the C++ reader: a checksum that does not fit, a short file
      raise UserError(f'{self._directory}: one of the blocks {min(indices)} to {max(indices)} is '
                      f'damaged ({" ".join(str(error).split())}); delete this folder and prepare '
                      'the data again') from error
    examples = map(tf_example_pb2.Example.FromString, records)
    return [np.asarray(example.features.feature['tokens'].int64_list.value, np.int32)
            for example in examples]
