"""TensorBoard files that a full disk does not stop.

tensorboardX writes in a thread, which dies at the first error; training would then wait for ever
for room in its queue. So errors are taken here: the first is logged, and the file ends there.
"""

import logging
import pathlib
from typing import Any

log = logging.getLogger(__name__)

_SCHEME = 'aogpt-jax'  # the name under which tensorboardX finds _Factory


class _File:
  """What tensorboardX needs of a file, without fileno: it need not be on the disk at once."""

  def __init__(self, path: str):
    self._path = path
    self._file: Any = open(path, 'wb')

  def _try(self, action: str, *args: bytes) -> None:
    if self._file is None:
      return
    try:
      getattr(self._file, action)(*args)
    except OSError as error:
      log.warning('%s: cannot be written: %s; TensorBoard gets no more of this run',
                  self._path, error.strerror)
      self._file = None

  def write(self, content: bytes) -> None:
    self._try('write', content)

  def flush(self) -> None:
    self._try('flush')

  def close(self) -> None:
    self._try('close')


class _Factory:
  def open(self, path: str) -> _File:
    return _File(path.removeprefix(f'{_SCHEME}:'))

  def directory_check(self, path: str) -> None:
    pathlib.Path(path.removeprefix(f'{_SCHEME}:')).mkdir(parents=True, exist_ok=True)


def open_board(directory: pathlib.Path, purge_step: int) -> Any:
  """A tensorboardX.SummaryWriter; what an earlier run wrote from `purge_step` on is not shown."""
  from tensorboardX import SummaryWriter, record_writer
  record_writer.register_writer_factory(_SCHEME, _Factory())
  return SummaryWriter(f'{_SCHEME}:{directory}', purge_step=purge_step)
