"""Tokenizers that need no training; in a module of their own, so that workers can import them."""

import os
import signal
import time

import numpy as np


class ByteTokenizer:
  """Bytes as ids; 256 ends a document."""

  vocab_size = 257
  end_of_text_id = 256
  fingerprint = 'bytes'

  def encode(self, text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


class WideTokenizer(ByteTokenizer):
  """Bytes as int64 ids from 100,000."""

  vocab_size = 100_257
  end_of_text_id = 100_256
  fingerprint = 'wide'

  def encode(self, text):
    return super().encode(text).astype(np.int64) + 100_000


class SlowStartTokenizer(ByteTokenizer):
  """Takes long for the texts that come first, and prints."""

  def encode(self, text):
    if text.startswith('document 1 '):
      time.sleep(0.3)
      print('loading', flush=True)
    return super().encode(text)


class FailingTokenizer(ByteTokenizer):
  def encode(self, text):
    if 'bad' in text:
      raise LookupError('no such\npiece')
    return super().encode(text)


class OutsideTokenizer(ByteTokenizer):
  vocab_size = 100


class DyingTokenizer(ByteTokenizer):
  """Its process is killed in the middle, but only where that is not the caller's."""

  def __init__(self):
    self.caller = os.getpid()

  def encode(self, text):
    if 'bad' in text and os.getpid() != self.caller:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().encode(text)


class UnloadableTokenizer(ByteTokenizer):
  def __setstate__(self, state):
    raise ImportError('no such library')

  def __getstate__(self):
    return {'x': 1}
