"""What is shown while a corpus is packed."""

import gzip
import itertools
import logging

import numpy as np

from aogpt_jax.data import meter, workers

RESULT = workers.Encoded(np.zeros(3, np.int32), np.array([3]), np.array([2_000_000]),
                        np.array([1]))


def test_log_lines_have_the_rate_and_the_time_that_is_left(monkeypatch, caplog):
  """10 MB were done before: they count as done, and not for the rate."""
  caplog.set_level(logging.INFO, 'aogpt_jax')
  seconds = itertools.count()
  monkeypatch.setattr(meter.time, 'monotonic', lambda: float(next(seconds)))
  monkeypatch.setattr(meter, 'LOG_SECONDS', 0)
  assert list(meter.show([RESULT] * 2, 'x', 30_000_000, 10_000_000)) == [RESULT] * 2
  assert caplog.messages[0] == 'packing x: 12 of about 30 MB, 1.0 MB/s, about 18 s left'


def test_lines():
  assert meter._line(5_000_000, 5_005_000_000, 1e6) == (
      '5 of about 5,005 MB, 1.0 MB/s, about 83 min left')
  assert meter._line(5_000_000, 4_000_000, 1e6) == '5 MB, 1.0 MB/s'
  assert meter._line(5_000_000, None, 1e6) == '5 MB, 1.0 MB/s'
  assert meter._line(0, 10, 0.0) == '0 of about 0 MB, 0.0 MB/s, about 10 s left'


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
  monkeypatch.setattr(meter.sys.stderr, 'isatty', lambda: True, raising=False)
  list(meter.show([RESULT] * 3, 'x', 10_000_000, 4_000_000))
  bar = capsys.readouterr().err.split('\r')[-1]
  assert 'packing x: 100%' in bar and '10.0M/10.0M' in bar and 'B/s]' in bar


def test_expected_bytes(tmp_path):
  (tmp_path / 'a.txt').write_text('x' * 100)
  (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(b'x' * 1000))
  (tmp_path / 'c.parquet').write_text('x')
  text, packed = tmp_path / 'a.txt', tmp_path / 'b.jsonl.gz'
  assert meter.expected_bytes([text, packed]) == 1100
  assert meter.expected_bytes([text, tmp_path / 'c.parquet']) is None
  assert meter.expected_bytes([text, tmp_path / 'missing.txt']) is None
  # Joined gzip files note the length of the last one alone: an impossible one is no estimate.
  packed.write_bytes(packed.read_bytes() + gzip.compress(b''))
  assert meter.expected_bytes([packed]) is None
