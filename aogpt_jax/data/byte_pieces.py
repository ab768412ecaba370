"""What tokenizers whose ids stand for bytes have in common: decoding, and one file on disk."""

import codecs
import hashlib
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from aogpt_jax.errors import UserError


class BytePieces:
  """Ids, each of which stands for some bytes of UTF-8 text.

  Attributes:
    vocab_size: number of ids.
    end_of_text_id: the id that ends a document; `encode` never produces it.
    fingerprint: sha256 (hex) of what `save` writes.
    spaced: whether a space must part the texts of neighbouring tokens; see IdsTokenizer.
  """

  spaced = False

  def __init__(self, pieces: Sequence[bytes], end_of_text_id: int, saved: bytes):
    """Takes the bytes of every id (none for end-of-text), and those that `save` writes."""
    self._bytes = list(pieces)
    self._saved = saved
    self.vocab_size: int = len(self._bytes)
    self.end_of_text_id = end_of_text_id
    self.fingerprint: str = hashlib.sha256(saved).hexdigest()

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of integer ids (n,).

    End-of-text is nothing, and each run of bytes that is no valid UTF-8 (a model can generate
    those) is U+FFFD, as is sentencepiece's unknown piece.

    Raises:
      UserError: if ids are not integers, not (n,) or not in [0, vocab_size).
    """
    ids = check_ids(ids, self.vocab_size)
    return b''.join([self._bytes[i] for i in ids.tolist()]).decode('utf-8', errors='replace')

  def count_bytes(self, token_counts: np.ndarray) -> int:
    """UTF-8 bytes of tokens that occur token_counts (vocab_size,) times each."""
    return int(np.dot(token_counts, [len(piece) for piece in self._bytes]))

  def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each of the ids (n,); joined, they are `decode(ids)`.

    A character of several byte tokens belongs to the last of them; the others are empty.
    """
    decoder = codecs.getincrementaldecoder('utf-8')('replace')
    ids = check_ids(ids, self.vocab_size).tolist()
    return [decoder.decode(self._bytes[i], final=at == len(ids) - 1) for at, i in enumerate(ids)]

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the tokenizer; a reader sees the old file or the new one, never a part."""
    path = pathlib.Path(path)
    unfinished = path.with_name(f'{path.name}.tmp-{os.getpid()}')
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      unfinished.write_bytes(self._saved)
      os.replace(unfinished, path)
    except OSError as error:
      unfinished.unlink(missing_ok=True)
      raise UserError(f'{path}: cannot be written: {error.strerror}') from None


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
  """Returns ids as an array; UserError unless they are integers (n,) in [0, vocab_size)."""
  ids = np.asarray(ids)
  if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
    raise UserError(f'ids must be integers of shape (n,), got {ids.dtype} {ids.shape}')
  outside = ids[(ids < 0) | (ids >= vocab_size)]
  if outside.size:
    raise UserError(f'id {outside[0]} is outside the vocabulary; '
                    f'valid: 0 to {vocab_size - 1}')
  return ids


def check_encodable(text: str) -> bytes:
  """Returns the text's UTF-8 bytes; UserError for a lone surrogate."""
  try:
    return text.encode('utf-8')
  except UnicodeEncodeError as error:
    raise UserError(f'the text has a lone surrogate {text[error.start]!a} at character '
                    f'{error.start}; a text must be valid Unicode') from None
