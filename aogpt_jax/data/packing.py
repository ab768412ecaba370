"""Documents to blocks of token ids, on disk as ArrayRecord.

Blocks lie under `DIRECTORY/NAME-HASH/`, where HASH stands for the corpus, its bytes, the tokenizer
and the block length: another request never touches the files of this one.

  prepared.json          what was prepared; written last, so its presence means complete
  token_counts.npy       int64 (vocab_size,), how often each id occurs in the blocks
  packed_blocks/1.0.0/   the blocks, as TFDS writes them (no TensorFlow involved)
"""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from aogpt_jax.data import corpora
from aogpt_jax.errors import UserError

_MARKER = 'prepared.json'
_COUNTS = 'token_counts.npy'
_SPLIT = 'blocks'  # TFDS wants a name for the only part
_VERSION = '1.1.0'  # of the files: part of the request's hash, so a new one is prepared anew


class Tokenizer(Protocol):
  """What packing needs of a tokenizer, such as SentencePieceTokenizer."""

  vocab_size: int
  end_of_text_id: int
  fingerprint: str

  def encode(self, text: str) -> np.ndarray: ...


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
    num_tokens: tokens of the corpus, with one end-of-text a document and with the remainder that
      fills no block.
    num_bytes: UTF-8 bytes of the documents.
    num_words: words of the documents, parted by white space.
  """

  directory: pathlib.Path
  corpus: str
  corpus_fingerprint: str
  tokenizer_fingerprint: str
  vocab_size: int
  block_length: int
  num_blocks: int
  num_documents: int
  num_tokens: int
  num_bytes: int
  num_words: int

  @property
  def bytes_per_token(self) -> float:
    """UTF-8 bytes a token: bits per byte = bits per token / this."""
    return self.num_bytes / self.num_tokens

  @property
  def token_counts(self) -> np.ndarray:
    """How often each id occurs in the blocks, int64 (vocab_size,)."""
    return np.load(self.directory / _COUNTS)


@dataclasses.dataclass
class PackingCounts:
  """What `pack` has consumed so far; see PreparedData for the meaning of the numbers."""

  num_documents: int = 0
  num_tokens: int = 0
  num_bytes: int = 0
  num_words: int = 0


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
    counts.num_tokens += ids.size + 1
    counts.num_bytes += len(document.encode('utf-8'))
    counts.num_words += len(document.split())
    rest = np.concatenate([rest, ids, end_of_text], dtype=np.int32)
    full = rest.size // block_length * block_length
    yield from rest[:full].reshape(-1, block_length)
    rest = rest[full:]


def prepare(directory: str | os.PathLike[str], corpus: str, tokenizer: Tokenizer,
            block_length: int) -> PreparedData:
  """Packs a corpus into blocks on disk, or finds them there from an earlier call.

  A call that was killed leaves no prepared.json: the next one starts from scratch. Two calls for
  the same blocks on one machine wait for each other and share them. `directory` must be on a file
  system with locks (flock).

  Args:
    directory: the blocks are put in a subdirectory of their own.
    corpus: a spec, see `corpora`.
    tokenizer: gives the ids.
    block_length: tokens a block.

  Raises:
    UserError: for a bad corpus, a block_length below 1, a corpus with fewer tokens than one block,
      or a directory that cannot be written.
  """
  request = {
    'corpus': corpus,
    'corpus_fingerprint': corpora.corpus_fingerprint(corpus),
    'tokenizer_fingerprint': tokenizer.fingerprint,
    'vocab_size': tokenizer.vocab_size,
    'block_length': block_length,
  }
  digest = hashlib.sha256(json.dumps([_VERSION, request], sort_keys=True).encode()).hexdigest()
  readable = re.sub(r'[^A-Za-z0-9]+', '-', corpus).strip('-')[-40:]
  target = pathlib.Path(directory).absolute() / f'{readable}-{block_length}-{digest[:12]}'
  with _exclusive(target):
    if not (target / _MARKER).exists():
      _build(target, request, tokenizer)
    return load_prepared(target)


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


def _build(target: pathlib.Path, request: dict, tokenizer: Tokenizer) -> None:
  """Writes the files of a request; the marker comes last."""
  block_length = request['block_length']
  counts = PackingCounts()
  token_counts = np.zeros((tokenizer.vocab_size,), np.int64)

  def counted(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    for block in blocks:
      token_counts[:] += np.bincount(block, minlength=tokenizer.vocab_size)
      yield block

  with contextlib.closing(_progress(corpora.read_documents(request['corpus']))) as documents:
    blocks = pack(documents, tokenizer, block_length, counts)
    first = next(blocks, None)
    if first is None:
      raise UserError(f'corpus "{request["corpus"]}" has {counts.num_tokens} tokens, fewer than '
                      f'one block of block_length = {block_length}; '
                      f'the nearest valid block_length is {counts.num_tokens}')
    shutil.rmtree(target, ignore_errors=True)  # what a killed call left
    num_blocks = _write_blocks(target, counted(itertools.chain([first], blocks)), block_length)
  np.save(target / _COUNTS, token_counts)
  record = {**request, 'num_blocks': num_blocks, **dataclasses.asdict(counts)}
  unfinished = target / f'{_MARKER}.tmp'
  unfinished.write_text(json.dumps(record, indent=2) + '\n')
  os.replace(unfinished, target / _MARKER)


def _progress(documents: Iterable[str]) -> Iterator[str]:
  """Passes documents on; shows their number where a person can see it."""
  import tqdm
  yield from tqdm.tqdm(documents, desc='packing', unit=' documents',
                       disable=not sys.stderr.isatty())


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
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
  finally:
    os.close(lock)


@functools.cache
def _builder_class() -> type:
  """Defines the TFDS builder, once a process (TFDS registers the name)."""
  import tensorflow_datasets as tfds

  class PackedText(tfds.core.GeneratorBasedBuilder):
    """Blocks of token ids, in the order in which they are given."""

    name = 'packed_blocks'

    VERSION = tfds.core.Version(_VERSION)

    def __init__(self, blocks: Iterable[np.ndarray], block_length: int, data_dir: str):
      self._blocks = blocks
      self._block_length = block_length
      super().__init__(data_dir=data_dir, file_format='array_record')

    def _info(self):
      # np.int32, not 'int32', and no shuffling: the alternatives need TensorFlow.
      tokens = tfds.features.Tensor(shape=(self._block_length,), dtype=np.int32)
      return tfds.core.DatasetInfo(builder=self, disable_shuffling=True,
                                   features=tfds.features.FeaturesDict({'tokens': tokens}))

    def _split_generators(self, dl_manager):
      return {_SPLIT: self._generate_examples()}

    def _generate_examples(self):
      for index, block in enumerate(self._blocks):
        yield index, {'tokens': block}

  return PackedText


def _write_blocks(target: pathlib.Path, blocks: Iterable[np.ndarray], block_length: int) -> int:
  """Writes blocks with TFDS and returns how many there were."""
  import tensorflow_datasets as tfds
  tfds.disable_progress_bar()  # its bars count bytes of nothing; ours counts documents
  with _quiet():
    builder = _builder_class()(blocks, block_length, str(target))
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False))
  shutil.rmtree(target / 'downloads')  # TFDS makes it in any case
  return builder.info.splits[_SPLIT].num_examples


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
  folder = prepared.directory / 'packed_blocks' / _VERSION
  advice = f'delete {prepared.directory} and prepare the data again'
  try:
    with _quiet():
      records = tfds.builder_from_directory(folder).as_data_source(
          split=_SPLIT, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
      found = len(records)
      _Records(records)[found - 1]  # a truncated file shows when it is first read
  except Exception as error:  # many types, from TFDS and from the C++ reader
    raise UserError(f'{folder}: the blocks are missing or damaged '
                    f'({type(error).__name__}); {advice}') from error
  if found != prepared.num_blocks:
    raise UserError(f'{folder}: holds {found} blocks, but prepared.json says '
                    f'{prepared.num_blocks}; {advice}')
  return _Records(records)


class _Records:
  """Decodes the records itself: TFDS' general decoder takes several times longer a record."""

  def __init__(self, records: Sequence[bytes]):
    self._records = records

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
    examples = map(tf_example_pb2.Example.FromString, self._records.__getitems__(indices))
    return [np.asarray(example.features.feature['tokens'].int64_list.value, np.int32)
            for example in examples]
