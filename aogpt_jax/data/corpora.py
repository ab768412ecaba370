"""Where documents come from: the text that ships with the package, or files of your own.

A corpus is named by a spec:

  embedded:shakespeare:train   NAME[:SPLIT] of the package's own text; the split may be left out
                               where there is only one (`embedded:milton`)
  files:texts/**/*.jsonl.gz    a glob. `.txt` is one document a file, `.jsonl` one document a line
                               in the string field "text"; each may end in `.gz`

Files are read in sorted order, as UTF-8, without any change to newlines or spaces.
"""

import glob
import gzip
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from aogpt_jax.errors import UserError, nearest

_EMBEDDED = pathlib.Path(__file__).parent / 'embedded'
_SCHEMES = ('embedded', 'files')
_SUFFIXES = ('.txt', '.jsonl', '.txt.gz', '.jsonl.gz')


def read_documents(spec: str) -> Iterator[str]:
  """Checks the corpus, then returns a generator of its documents.

  Args:
    spec: `embedded:NAME[:SPLIT]` or `files:GLOB`, see the module's page.

  Returns:
    The documents as str, in the same order each time. A .jsonl document may be empty; blank lines
    of a .jsonl file are skipped. Every document can be encoded as UTF-8.

  Raises:
    UserError: at the call for all that `check_corpus` finds; while reading for a file that is
      empty or whitespace only, invalid UTF-8, a bad JSON line, a missing "text" or broken gzip.
  """
  paths = check_corpus(spec)
  return (document for path in paths for document in _read_file(path))


def check_corpus(spec: str) -> list[pathlib.Path]:
  """Checks everything that can be known without reading the corpus; returns its sorted files.

  Raises:
    UserError: for an unknown scheme, name or split, a glob that matches no file, a suffix that is
      not read, a file that cannot be opened or has zero bytes.
  """
  scheme, colon, rest = spec.partition(':')
  if not colon:
    raise UserError(f'corpus "{spec}" must be embedded:NAME[:SPLIT] or files:GLOB; '
                    f'did you mean "files:{spec}"?')
  if scheme not in _SCHEMES:
    raise UserError(f'corpus "{spec}": unknown scheme "{scheme}"{nearest(scheme, _SCHEMES)}')
  paths = _embedded_paths(spec, rest) if scheme == 'embedded' else _glob_paths(spec, rest)
  for path in paths:
    _check_file(path)
  return paths


def corpus_fingerprint(spec: str) -> str:
  """Returns the sha256 (hex) of the bytes of the corpus' files, in order: equal for equal text."""
  total = hashlib.sha256()
  for path in check_corpus(spec):
    try:
      with open(path, 'rb') as file:
        # One digest a file: moving bytes from the end of one to the start of the next must show.
        total.update(hashlib.file_digest(file, 'sha256').digest())
    except OSError as error:
      raise UserError(f'{path}: cannot be read: {error.strerror}') from None
  return total.hexdigest()


def _embedded_paths(spec: str, rest: str) -> list[pathlib.Path]:
  splits: dict[str, dict[str, pathlib.Path]] = {}
  for path in sorted(_EMBEDDED.glob('*.jsonl.gz')):
    name, _, split = path.name.removesuffix('.jsonl.gz').rpartition('-')
    splits.setdefault(name, {})[split] = path
  name, colon, split = rest.partition(':')
  if name not in splits:
    raise UserError(f'corpus "{spec}": unknown embedded text "{name}"{nearest(name, splits)}')
  if not colon and len(splits[name]) > 1:
    raise UserError(f'corpus "{spec}": name a split of "{name}"; '
                    f'valid: {", ".join(f"{spec}:{s}" for s in splits[name])}')
  if not colon:
    return list(splits[name].values())
  if split not in splits[name]:
    raise UserError(f'corpus "{spec}": "{name}" has no split "{split}"; '
                    f'valid: {", ".join(splits[name])}')
  return [splits[name][split]]


def _glob_paths(spec: str, pattern: str) -> list[pathlib.Path]:
  pattern = os.path.expanduser(pattern)
  # A path that exists is meant literally, even where its name has glob characters.
  found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
  paths = sorted(path for path in map(pathlib.Path, found) if not path.is_dir())
  if not paths:
    inside = ' (a folder: append "/*.txt")' if os.path.isdir(pattern) else ''
    raise UserError(f'corpus "{spec}": no file matches "{pattern}"{inside}; '
                    f'looked from {os.getcwd()}')
  return paths


def _check_file(path: pathlib.Path) -> None:
  if not path.name.endswith(_SUFFIXES):
    raise UserError(f'{path}: the suffix must be one of {", ".join(_SUFFIXES)}')
  try:
    with open(path, 'rb') as file:
      empty = not file.read(1)
  except OSError as error:
    raise UserError(f'{path}: cannot be read: {error.strerror}') from None
  if empty:
    raise UserError(f'{path}: the file is empty; a corpus file must hold text')


def _read_file(path: pathlib.Path) -> Iterator[str]:
  """Yields the documents of one file; what the file system or gzip raises becomes a UserError."""
  opener = gzip.open if path.suffix == '.gz' else open
  is_text = path.name.endswith(('.txt', '.txt.gz'))
  read = _read_text if is_text else _read_jsonl
  blank = True
  try:
    with opener(path, 'rb') as file:
      for document in read(path, file):
        blank = blank and not document.strip()
        # A blank .txt is reported below instead of passed on.
        if not (is_text and blank):
          yield document
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise UserError(f'{path}: not a complete gzip file: {error}') from None
  except OSError as error:
    raise UserError(f'{path}: cannot be read: {error.strerror or error}') from None
  if blank:
    raise UserError(f'{path}: the file is empty or whitespace only; a corpus file must hold text')


def _read_text(path: pathlib.Path, file: BinaryIO) -> Iterator[str]:
  yield _decode(file.read(), 0, str(path))


def _read_jsonl(path: pathlib.Path, file: BinaryIO) -> Iterator[str]:
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
    if not isinstance(record, dict) or not isinstance(record.get('text'), str):
      raise UserError(f'{where}: must be a JSON object with the text in a string field "text"')
    try:
      # JSON can spell half a surrogate pair as \ud800, which no UTF-8 text can hold.
      record['text'].encode('utf-8')
    except UnicodeEncodeError as error:
      raise UserError(f'{where}: "text" has a lone surrogate at character {error.start}') from None
    yield record['text']


def _decode(data: bytes, offset: int, where: str) -> str:
  """Decodes bytes that start at `offset` of the (unpacked) file."""
  try:
    return data.decode('utf-8')
  except UnicodeDecodeError as error:
    raise UserError(f'{where}: invalid UTF-8 at byte {offset + error.start}: {error.reason}; '
                    'convert the file to UTF-8') from None
