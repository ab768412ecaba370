"""GPT-2's byte-level BPE, through tiktoken, and plain bytes.

Both are saved as one JSON file, so that a run directory needs nothing else: for GPT-2 it holds the
bytes of every id, in order, which is all that the merges say.
"""

import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from aogpt_jax.data import online
from aogpt_jax.data.byte_pieces import BytePieces, check_encodable
from aogpt_jax.errors import UserError

_KIND = 'aogpt_jax_tokenizer'
SAVED_START = f'{{"{_KIND}": '.encode()  # of every file written here; no sentencepiece model's
END_OF_TEXT = '<|endoftext|>'
# How GPT-2 cuts text before any merge. '++' and '\s++$' take a run in one go, which is the same
# cut without the backtracking.
_WORDS = (r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s+")
_URL = 'https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/'
_FILES = (('vocab.bpe', 'encoder.json'), ('merges.txt', 'vocab.json'))  # GPT-2's names, and others'


class BytesTokenizer(BytePieces):
  """Ids 0 to 255 are bytes, 256 is end-of-text."""

  def __init__(self):
    super().__init__([*(bytes([b]) for b in range(256)), b''], 256,
                     json.dumps({_KIND: 'bytes'}).encode())

  def encode(self, text: str) -> np.ndarray:
    """Returns the UTF-8 bytes of a text, int32 (n,); UserError for a lone surrogate."""
    return np.frombuffer(check_encodable(text), np.uint8).astype(np.int32)


class BytePairTokenizer(BytePieces):
  """Byte-level BPE that cuts words as GPT-2 does.

  Attributes: as of BytePieces.
  """

  def __init__(self, pieces: Sequence[bytes], end_of_text_id: int, name: str = 'tokenizer'):
    """Makes a tokenizer.

    Args:
      pieces: the bytes of every id; what was merged first has the lower id.
      end_of_text_id: its bytes are b''.
      name: what to call it in an error, such as its path.

    Raises:
      UserError: without tiktoken, or if the pieces are not distinct or lack a byte.
    """
    online.require('tiktoken', 'gpt2', name)
    import tiktoken
    ranks = {piece: i for i, piece in enumerate(pieces) if i != end_of_text_id}
    if len(ranks) != len(pieces) - 1 or b'' in ranks:
      raise UserError(f'{name}: not a byte-level BPE: two ids stand for the same bytes, or one for '
                      'none')
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
      raise UserError(f'{name}: not a byte-level BPE: no id stands for the byte {missing[0]}')
    # Without special tokens: what spells end-of-text must never become it.
    self._encoding = tiktoken.Encoding(
        'gpt2', pat_str=_WORDS, mergeable_ranks=ranks, special_tokens={})
    super().__init__(pieces, end_of_text_id, json.dumps(
        {_KIND: 'byte_pair', 'end_of_text_id': end_of_text_id,
         'pieces': [piece.decode('latin-1') for piece in pieces]}).encode())

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of a text, int32 (n,); n = 0 for ''. Never the end-of-text id.

    Text that spells '<|endoftext|>' is only its characters.

    Raises:
      UserError: if the text has a lone surrogate, which UTF-8 cannot hold.
    """
    check_encodable(text)
    return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

  def __reduce__(self):
    return BytePairTokenizer, (self._bytes, self.end_of_text_id)


def parse_saved(data: bytes, name: str) -> BytesTokenizer | BytePairTokenizer:
  """Makes the tokenizer that wrote `data`; UserError if it is damaged."""
  try:
    saved = json.loads(data)
    if saved[_KIND] == 'bytes':
      return BytesTokenizer()
    if saved[_KIND] != 'byte_pair':
      raise ValueError
    pieces = [piece.encode('latin-1') for piece in saved['pieces']]
    end_of_text_id = range(len(pieces))[saved['end_of_text_id']]
  except (ValueError, KeyError, TypeError, AttributeError, IndexError):
    raise UserError(f'{name}: damaged, or a tokenizer of a newer version') from None
  return BytePairTokenizer(pieces, end_of_text_id, name)


def load_gpt2() -> BytePairTokenizer:
  """GPT-2's own tokenizer, from tiktoken's cache or, if it is not there, from the network.

  Raises:
    UserError: without tiktoken, or if it is not in the cache and there is no network.
  """
  name = "data.tokenizer='gpt2'"
  online.require('tiktoken', 'gpt2', name)
  import tiktoken
  instead = ("copy vocab.bpe and encoder.json here and name their folder "
             "(data.tokenizer='gpt2:DIRECTORY'), or set TIKTOKEN_CACHE_DIR to a filled cache")
  if not _is_cached() and not online.reachable(_URL):
    raise UserError(f'{name}: is not in the cache of tiktoken, and there is no network; {instead}')
  try:
    encoding = tiktoken.get_encoding('gpt2')
  except Exception as error:  # of requests, of the system, a wrong hash
    raise UserError(
        f'{name}: tiktoken cannot get it ({type(error).__name__}); {instead}') from error
  end = encoding.eot_token
  pieces = [b'' if i == end else encoding.decode_single_token_bytes(i)
            for i in range(encoding.n_vocab)]
  return BytePairTokenizer(pieces, end, name)


def _is_cached() -> bool:
  """Whether tiktoken has the files; it names them by the sha1 of where they come from."""
  folder = os.environ.get('TIKTOKEN_CACHE_DIR', os.environ.get('DATA_GYM_CACHE_DIR'))
  if folder is None:
    folder = os.path.join(tempfile.gettempdir(), 'data-gym-cache')
  names = [hashlib.sha1((_URL + file).encode()).hexdigest() for file in _FILES[0]]
  return bool(folder) and all(os.path.exists(os.path.join(folder, name)) for name in names)


def read_gpt2(directory: str | os.PathLike[str]) -> BytePairTokenizer:
  """Reads GPT-2's vocab.bpe and encoder.json (elsewhere called merges.txt and vocab.json).

  Raises:
    UserError: if they are missing, damaged, do not belong together, or hold ids that are neither
      bytes, nor merges, nor '<|endoftext|>'.
  """
  folder = pathlib.Path(directory).expanduser()
  found = [names for names in _FILES if all((folder / name).is_file() for name in names)]
  if not found:
    raise UserError(f"data.tokenizer='gpt2:{directory}': the folder must hold vocab.bpe and "
                    'encoder.json')
  merges_path, ids_path = (folder / name for name in found[0])
  ids = _read_ids(ids_path)
  bytes_of = {spelling: byte for byte, spelling in enumerate(_byte_spellings())}
  pieces: dict[str, bytes] = {spelling: bytes([b]) for spelling, b in bytes_of.items()}
  last = -1
  for number, line in enumerate(_read(merges_path).split('\n'), start=1):
    line = line.removesuffix('\r')
    if not line or (number == 1 and line.startswith('#version')):
      continue
    where = f'{merges_path}, line {number}'
    parts = line.split(' ')
    merged = ''.join(parts)
    if len(parts) != 2 or any(part not in pieces for part in parts) or merged in pieces:
      raise UserError(f'{where}: must be two pieces with a space between them, each known before '
                      'and new together')
    if ids.get(merged, -1) <= last:
      raise UserError(f'{where}: {merged!a} must have an id in {ids_path.name}, greater than '
                      f'{last} of the merges before it')
    last = ids[merged]
    pieces[merged] = pieces[parts[0]] + pieces[parts[1]]
  pieces[END_OF_TEXT] = b''
  if set(pieces) != set(ids):
    other = sorted(set(pieces) ^ set(ids))[0]
    raise UserError(f'{ids_path}: does not belong to {merges_path.name}: {other!a} is in one only')
  return BytePairTokenizer([pieces[p] for p in sorted(ids, key=ids.get)], ids[END_OF_TEXT],
                           str(ids_path))


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{path}: cannot be read: {error}') from None


def _read_ids(path: pathlib.Path) -> dict[str, int]:
  try:
    ids = json.loads(_read(path))
  except ValueError as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f'{path}: not valid JSON: {error}') from None
  if not isinstance(ids, dict) or sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
    raise UserError(f'{path}: must map each piece to an id, from 0 on without a gap')
  return ids


def _byte_spellings() -> list[str]:
  """The character by which the two files spell each byte: itself, or one from U+0100 on."""
  own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = iter(range(0x100, 0x200))
  return [chr(byte if byte in own else next(others)) for byte in range(256)]
