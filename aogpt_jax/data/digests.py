"""sha256 of files, remembered between runs: a corpus of 50 GB is not hashed at every start."""

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from aogpt_jax.errors import UserError

_REMEMBER_FROM = 2**24  # bytes; a smaller file is hashed in less time than it is looked up
# A file that changed this lately (seconds) may change again within the resolution of its time.
_SETTLED_AFTER = 10


def file_digests(paths: Sequence[str | os.PathLike[str]]) -> list[bytes]:
  """Returns the sha256 of each file's bytes.

  The digests of large files are kept in `digests.json` in the user's cache directory
  (`$XDG_CACHE_HOME/aogpt_jax`, else `~/.cache/aogpt_jax`) under (absolute path, size, time of the
  last change). Where that cannot be written every call reads every byte.

  Raises:
    UserError: if a file cannot be read.
  """
  known = _load()
  digests, found = [], {}
  for path in paths:
    try:
      digest, entry = _digest(path, known.get(os.path.abspath(path)))
    except OSError as error:
      raise UserError(f'{path}: cannot be read: {error.strerror}') from None
    digests.append(digest)
    if entry:
      found[os.path.abspath(path)] = entry
  if any(known.get(path) != entry for path, entry in found.items()):
    _save({**known, **found})
  return digests


def _digest(path: str | os.PathLike[str], entry: Any) -> tuple[bytes, list | None]:
  """Returns the digest and, if it may be kept, its entry."""
  with open(path, 'rb') as file:
    before = os.fstat(file.fileno())
    state = [before.st_size, before.st_mtime_ns]
    if isinstance(entry, list) and entry[:2] == state and _is_digest(entry[-1]):
      return bytes.fromhex(entry[2]), entry
    digest = hashlib.file_digest(file, 'sha256').digest()
    after = os.fstat(file.fileno())
  settled = time.time() - after.st_mtime > _SETTLED_AFTER
  unchanged = [after.st_size, after.st_mtime_ns] == state
  keep = settled and unchanged and before.st_size >= _REMEMBER_FROM
  return digest, [*state, digest.hex()] if keep else None


def _is_digest(value: Any) -> bool:
  return isinstance(value, str) and len(value) == 64 and not value.strip('0123456789abcdef')


def _cache_file() -> pathlib.Path:
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return pathlib.Path(cache) / 'aogpt_jax' / 'digests.json'


def _load() -> dict[str, Any]:
  try:
    known = json.loads(_cache_file().read_text())
  except (OSError, ValueError):
    return {}
  return known if isinstance(known, dict) else {}


def _save(known: dict[str, Any]) -> None:
  path = _cache_file()
  unfinished = path.with_name(f'{path.name}.tmp-{os.getpid()}')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(json.dumps(known))
    os.replace(unfinished, path)
  except OSError:
    pass  # it only saves time
