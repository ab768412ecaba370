"""Documents in files: .txt, .jsonl and .parquet, the first two also packed by gzip or zstd.

A file is read as a stream: what is in memory is one document, or a few hundred rows of a .parquet
file, and never the file (but a .txt that is one document).
"""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from aogpt_jax.data import online
from aogpt_jax.errors import UserError

_PACKED = ('', '.gz', '.zst')
_TEXT = tuple('.txt' + packed for packed in _PACKED)
_JSONL = tuple('.jsonl' + packed for packed in _PACKED)
_SUFFIXES = (*_TEXT, *_JSONL, '.parquet')
# Few bytes: those of a hostile file may unpack to 30,000 times as many, all at once.
_ZSTD_READ = 4096


@dataclasses.dataclass(frozen=True)
class Source:
  """A corpus that was found and checked.

  Attributes:
    files: what its text is read from, in order.
    identity: what, besides the bytes of the files, decides the documents.
    read: begins to read; gives the documents.
  """

  files: Sequence[pathlib.Path]
  identity: tuple[str, ...]
  read: Callable[[], Iterator[str]]


def open_files(paths: Sequence[pathlib.Path], field: str = 'text', document: str = 'file',
               clean: Callable[[str], str] = str) -> Source:
  """Checks files without reading their text.

  Args:
    paths: in the order in which they are read.
    field: of .jsonl and .parquet.
    document: what a document of .txt is, `file` or `line`.
    clean: is applied to every line of .txt that is a document.

  Raises:
    UserError: for a suffix that is not read, a package that is missing, a file that cannot be
      opened or has no bytes, a .parquet file without the field.
  """
  for path in paths:
    _check_file(path, field)
  by_line = document == 'line'
  # What reads as it does by default adds nothing: such a corpus is known by its bytes.
  identity = (f'field={field}',) * (field != 'text')
  identity += ('document=line', f'clean={clean.__name__}') * by_line

  def read() -> Iterator[str]:
    for path in paths:
      yield from _read_file(path, field, by_line, clean)

  return Source(paths, identity, read)


def is_text(path: pathlib.Path) -> bool:
  """Whether a file is .txt, packed or not."""
  return path.name.endswith(_TEXT)


def _check_file(path: pathlib.Path, field: str) -> None:
  if not path.name.endswith(_SUFFIXES):
    raise UserError(f'{path}: the suffix must be one of {", ".join(_SUFFIXES)}')
  try:
    with open(path, 'rb') as file:
      empty = not file.read(1)
  except OSError as error:
    raise UserError(f'{path}: cannot be read: {error.strerror}') from None
  if empty:
    raise UserError(f'{path}: the file is empty; a corpus file must hold text')
  if path.suffix == '.zst':
    online.require('zstandard', 'zstd', str(path))
  if path.suffix == '.parquet':
    online.require('pyarrow', 'parquet', str(path))
    with _parquet(path) as parquet:
      names = parquet.schema_arrow.names
    if field not in names:
      raise UserError(f'{path}: has no field "{field}"; valid: {", ".join(names)}')


def _read_file(path: pathlib.Path, field: str, by_line: bool, clean: Callable[[str], str],
               ) -> Iterator[str]:
  """Yields the documents of one file; what the file system or a codec raises is a UserError."""
  whole = is_text(path) and not by_line
  if path.suffix == '.parquet':
    documents = _read_parquet(path, field)
  else:
    read = (_read_jsonl if not is_text(path) else _read_lines if by_line else _read_text)
    documents = _read_stream(path, functools.partial(read, field=field, clean=clean))
  blank = True
  for document in documents:
    blank = blank and not document.strip()
    # A blank .txt is reported below instead of passed on.
    if not (whole and blank):
      yield document
  if blank:
    raise UserError(f'{path}: the file is empty or whitespace only; a corpus file must hold text')


def _read_stream(path: pathlib.Path, read: Callable[[pathlib.Path, BinaryIO], Iterator[str]],
                 ) -> Iterator[str]:
  """Applies `read` to the unpacked bytes of a file."""
  opener = {'.gz': gzip.open, '.zst': _open_zstd}.get(path.suffix, open)
  try:
    with opener(path, 'rb') as file:
      yield from read(path, file)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    kind = 'zstd' if path.suffix == '.zst' else 'gzip'
    raise UserError(f'{path}: not a complete {kind} file: {error}') from None
  except OSError as error:
    raise UserError(f'{path}: cannot be read: {error.strerror or error}') from None


def _read_text(path: pathlib.Path, file: BinaryIO, **_) -> Iterator[str]:
  yield _decode(file.read(), 0, str(path))


def _read_lines(path: pathlib.Path, file: BinaryIO, clean: Callable[[str], str], **_,
                ) -> Iterator[str]:
  offset = 0
  for number, line in enumerate(file, start=1):
    text = _decode(line, offset, f'{path}, line {number}')
    offset += len(line)
    yield clean(text.removesuffix('\n').removesuffix('\r'))


def _read_jsonl(path: pathlib.Path, file: BinaryIO, field: str, **_) -> Iterator[str]:
  offset = 0
  for number, line in enumerate(file, start=1):
    where = f'{path}, line {number}'
    text = _decode(line, offset, where)
    offset += len(line)
    if not text.strip():
      continue
    try:
      record = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise UserError(f'{where}: not valid JSON: {error}') from None
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
      has = f'; it has {", ".join(record)[:200]}' if isinstance(record, dict) and record else ''
      raise UserError(
          f'{where}: must be a JSON object with the text in a string field "{field}"{has}')
    try:
      # JSON can spell half a surrogate pair as \ud800, which no UTF-8 text can hold.
      record[field].encode('utf-8')
    except UnicodeEncodeError as error:
      raise UserError(
          f'{where}: "{field}" has a lone surrogate at character {error.start}') from None
    yield record[field]


@contextlib.contextmanager
def _parquet(path: pathlib.Path) -> Iterator:
  """Opens a .parquet file; what pyarrow raises inside becomes a UserError."""
  import pyarrow
  from pyarrow import parquet
  try:
    with parquet.ParquetFile(path, buffer_size=2**20) as file:
      yield file
  except (pyarrow.ArrowException, OSError) as error:
    raise UserError(f'{path}: not a complete parquet file: {in_one_line(error)}') from None


def _read_parquet(path: pathlib.Path, field: str) -> Iterator[str]:
  number = 0
  with _parquet(path) as file:
    for batch in file.iter_batches(batch_size=256, columns=[field]):
      for value in batch.column(0):
        number += 1
        yield check_text(value, f'{path}, record {number}', field)


def check_text(value: object, where: str, field: str) -> str:
  """Returns the text of a record's field, which may be UTF-8 bytes or an arrow scalar.

  Raises:
    UserError: if it is none, or not UTF-8.
  """
  try:
    if hasattr(value, 'as_py'):
      value = value.as_py()
    if isinstance(value, bytes):
      return value.decode('utf-8')
  except UnicodeDecodeError as error:
    raise UserError(f'{where}: "{field}" is invalid UTF-8 at byte {error.start}: {error.reason}',
                    ) from None
  if not isinstance(value, str):
    raise UserError(f'{where}: "{field}" must be a text, not {type(value).__name__}')
  return value


def in_one_line(error: BaseException) -> str:
  """The beginning of another library's message."""
  return ' '.join(str(error).split())[:300] or type(error).__name__


def _decode(data: bytes, offset: int, where: str) -> str:
  """Decodes bytes that start at `offset` of the (unpacked) file."""
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    raise UserError(f'{where}: invalid UTF-8 at byte {offset + error.start}: {error.reason}; '
                    'convert the file to UTF-8') from None


def _open_zstd(path: pathlib.Path, mode: str) -> BinaryIO:
  return io.BufferedReader(_ZstdReader(open(path, mode)), 2**20)


class _ZstdReader(io.RawIOBase):
  """Unpacks frame by frame. zstandard's own reader takes a truncated file for a whole one."""

  def __init__(self, file: BinaryIO):
    self._file = file
    self._frame = None
    self._rest = b''
    self._ready = memoryview(b'')

  def readable(self) -> bool:
    return True

  def close(self) -> None:
    self._file.close()
    super().close()

  def readinto(self, buffer) -> int:
    """Fills the buffer with what is unpacked; EOFError for a truncated or damaged file."""
    while not self._ready:
      packed = self._rest or self._file.read(_ZSTD_READ)
      self._rest = b''
      if not packed:
        if self._frame is not None:
          raise EOFError('it ends within a frame')
        return 0
      self._ready = memoryview(self._unpack(packed))
    size = min(len(buffer), len(self._ready))
    buffer[:size] = self._ready[:size]
    self._ready = self._ready[size:]
    return size

  def _unpack(self, packed: bytes) -> bytes:
    import zstandard
    if self._frame is None:
      self._frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    try:
      data = self._frame.decompress(packed)
    except zstandard.ZstdError as error:
      raise EOFError(in_one_line(error)) from None
    if self._frame.eof:
      self._rest, self._frame = self._frame.unused_data, None
    return data
