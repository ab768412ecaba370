"""How far the reading of a corpus is: a bar on a terminal, a log line now and then elsewhere."""

import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator

from aogpt_jax.data.workers import Encoded

LOG_SECONDS = 10.0
log = logging.getLogger(__name__)


def show(results: Iterable[Encoded], name: str, total: int | None, done: int) -> Iterator[Encoded]:
  """Passes results on; shows their bytes, MB/s and the time that is left.

  Args:
    results: what is counted.
    name: of the corpus.
    total: bytes of text to come to, about; None if unknown.
    done: bytes that an earlier call has done.
  """
  import tqdm
  start = last = time.monotonic()
  seen = done
  with tqdm.tqdm(desc=f'packing {name}', total=total, initial=done, unit='B', unit_scale=True,
                 disable=not sys.stderr.isatty()) as bar:
    for result in results:
      yield result
      size = int(result.num_bytes.sum())
      seen += size
      bar.update(size)
      if bar.disable and time.monotonic() - last >= LOG_SECONDS:
        last = time.monotonic()
        log.info('packing %s: %s', name, _line(seen, total, (seen - done) / (last - start)))


def _line(seen: int, total: int | None, rate: float) -> str:
  """'120 of about 480 MB, 8.0 MB/s, about 45 s left'."""
  if total is None or seen > total:  # the total of compressed files is an estimate
    return f'{seen / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s'
  left = (total - seen) / max(rate, 1)
  time_left = f'{left:.0f} s' if left < 120 else f'{left / 60:.0f} min'
  return (f'{seen / 1e6:,.0f} of about {total / 1e6:,.0f} MB, {rate / 1e6:.1f} MB/s, '
          f'about {time_left} left')


def expected_bytes(paths: Iterable[str | os.PathLike[str]]) -> int | None:
  """About how many bytes of text the files of a corpus hold; None where the names do not tell."""
  sizes = [_text_bytes(pathlib.Path(path)) for path in paths]
  return None if None in sizes else sum(sizes)


def _text_bytes(path: pathlib.Path) -> int | None:
  try:
    size = path.stat().st_size
    if path.name.endswith(('.txt', '.jsonl')):
      return size
    if not path.name.endswith(('.txt.gz', '.jsonl.gz')) or size < 4:
      return None
    with open(path, 'rb') as file:
      file.seek(-4, os.SEEK_END)
      unpacked = int.from_bytes(file.read(4), 'little')
  except OSError:  # the reader will say so
    return None
  # gzip notes the length in 32 bits, and of its last part alone.
  return unpacked if unpacked > size else None
