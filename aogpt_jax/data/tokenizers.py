"""Tokenizers by name, and a byte-complete SentencePiece BPE.

`decode(encode(text)) == text` for any text, here and in `byte_pair` (GPT-2's BPE, bytes); the text
of `IdsTokenizer`, for models without a tokenizer, is the ids themselves.

Ids of sentencepiece: 0 is its unknown piece (never produced: every character has its bytes to fall
back on), 1 is end-of-text (its eos control piece), 2 is the newline, 3..258 are the 256 byte
pieces, the rest are learned pieces, the merges in the order they were learned and then single
characters.

Nothing is normalised: no dummy prefix, no whitespace removed. A newline is always one token of its
own, so that lines of verse and dialogue look alike wherever they break. A space is only ever the
start of a piece or a run of spaces. Tabs, NUL and the characters sentencepiece reserves for
itself (U+2581, U+2585) are always spelled in bytes.
"""

import hashlib
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from aogpt_jax.data import byte_pair
from aogpt_jax.data.byte_pieces import BytePieces, check_encodable, check_ids
from aogpt_jax.errors import UserError, nearest

_SPACE = '\u2581'  # sentencepiece's escape for a space
# Sentencepiece skips sentences with NUL or U+2585 and takes U+2581 and tab for its own marks:
# training sentences end there, and at newlines. They also end at a space after at most 16384
# characters, since the trainer counts positions within a word in 16 bits.
_SENTENCE = re.compile('[^\0\t\n\u2581\u2585]{1,16384}(?![^ \0\t\n\u2581\u2585])|'
                       '[^\0\t\n\u2581\u2585]{1,16384}')
_FIXED_PIECES = 259  # unknown, end-of-text, newline and 256 bytes
_MAX_VOCAB_SIZE = 2**20  # far above any in use; sentencepiece takes minutes to refuse 2**31
_ROUND_TRIP_PROBE = '  A \n\n\t\0 caf\u00e9\u2581 \ufb01 </s>\r\n '


class SentencePieceTokenizer(BytePieces):
  """Text to ids and back, from the bytes of a sentencepiece model, which are what is saved.

  Attributes: as of BytePieces.
  """

  def __init__(self, model: bytes, name: str = 'tokenizer model'):
    """Loads a model.

    Args:
      model: the bytes of a sentencepiece model with byte fallback and an eos piece.
      name: what to call it in an error, such as its path.

    Raises:
      UserError: if the bytes are no such model, or if it does not give back the text it is given.
    """
    import sentencepiece
    try:
      self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError:
      raise UserError(f'{name}: not a sentencepiece model (damaged or another format)') from None
    size = self._processor.vocab_size()
    super().__init__([_piece_bytes(self._processor, i) for i in range(size)],
                     self._processor.eos_id() if size else -1, model)
    self._space_ids = [self._processor.piece_to_id(f'<0x{b:02X}>') for b in _SPACE.encode()]
    if self.end_of_text_id < 0 or not all(map(self._processor.is_byte, self._space_ids)):
      raise UserError(f'{name}: the sentencepiece model must have an eos piece and byte fallback; '
                      'train one with train_sentencepiece')
    if self.decode(self.encode(_ROUND_TRIP_PROBE)) != _ROUND_TRIP_PROBE:
      raise UserError(f'{name}: the sentencepiece model changes the text (normalisation, dummy '
                      'prefix or removed spaces); train one with train_sentencepiece')

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids of a text, int32 (n,); n = 0 for ''. Never the end-of-text id.

    Text that spells a control or byte piece ('</s>', '<0x41>') is only its characters.

    Raises:
      UserError: if the text has a lone surrogate, which UTF-8 cannot hold.
    """
    check_encodable(text)
    first, *others = map(self._processor.encode, text.split(_SPACE))
    for ids in others:
      # Sentencepiece would give U+2581 back as a space, so it is spelled in bytes.
      first += self._space_ids + ids
    return np.asarray(first, dtype=np.int32)


class IdsTokenizer:
  """Ids in decimal, parted by spaces: '3 17 4' is [3, 17, 4].

  The tokenizer of a model that came without one, named by data.tokenizer='ids'.

  Attributes:
    vocab_size: number of ids.
    fingerprint: sha256 (hex) of what it is.
    spaced: '3' and '17' make '3 17', not '317'.
  """

  spaced = True

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size
    self.fingerprint = hashlib.sha256(f'ids {vocab_size}'.encode()).hexdigest()

  def encode(self, text: str) -> np.ndarray:
    """Returns the ids that a text spells, int32 (n,); any white space may stand around them.

    Raises:
      UserError: for a word that is not an id in 0..vocab_size-1 as `decode` writes it.
    """
    words = text.split()
    for word in words:
      if not re.fullmatch('0|[1-9][0-9]{0,9}', word) or int(word) >= self.vocab_size:
        raise UserError(f'"{word[:40]}" is not an id; the texts of this model are ids from 0 to '
                        f'{self.vocab_size - 1} with spaces between them, such as "3 17 4"')
    return np.array([int(word) for word in words], np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of integer ids (n,); UserError as BytePieces.decode."""
    return ' '.join(map(str, check_ids(ids, self.vocab_size).tolist()))

  def pieces(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each of the ids (n,); joined, they are `decode(ids)`."""
    ids = check_ids(ids, self.vocab_size).tolist()
    return [' ' * (at > 0) + str(i) for at, i in enumerate(ids)]


ByteTokenizer = (
    SentencePieceTokenizer | byte_pair.BytePairTokenizer | byte_pair.BytesTokenizer)
Tokenizer = ByteTokenizer | IdsTokenizer


def make_tokenizer(name: str) -> ByteTokenizer:
  """The tokenizer that a config's data.tokenizer names, where it need not be trained.

  Args:
    name: `gpt2` (from tiktoken's cache, else downloaded), `gpt2:DIRECTORY` (vocab.bpe and
      encoder.json), `bytes`, or the path of a saved tokenizer, such as another run's
      tokenizer.model.

  Raises:
    UserError: for another name, or what is wrong with the files.
  """
  kind, colon, rest = name.partition(':')
  if kind == 'gpt2' and colon:
    return byte_pair.read_gpt2(rest)
  if name in ('gpt2', 'bytes'):
    return byte_pair.load_gpt2() if name == 'gpt2' else byte_pair.BytesTokenizer()
  path = pathlib.Path(name).expanduser()
  if not path.is_file():
    names = ('sentencepiece', 'gpt2', 'gpt2:DIRECTORY', 'bytes')
    why = ('is of converted checkpoints, whose texts are ids; choose another' if name == 'ids' else
           f'is no file, nor one of {", ".join(names)}')
    hint = nearest(name, names)
    raise UserError(f'data.tokenizer={name!r}: {why}' + hint * ('did you mean' in hint))
  return load_tokenizer(path)


def make_for_vocabulary(name: str, vocab_size: int) -> ByteTokenizer:
  """`make_tokenizer` for a model of `vocab_size` ids; UserError also if it knows too few."""
  tokenizer = make_tokenizer(name)
  if tokenizer.vocab_size > vocab_size:
    raise UserError(f'tokenizer={name!r}: has {tokenizer.vocab_size} ids, but the model knows '
                    f'{vocab_size} only; name the one that it was trained with')
  return tokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> ByteTokenizer:
  """Reads a tokenizer that `save` wrote, of any kind.

  Raises:
    UserError: if the file is missing, unreadable, damaged, or not a tokenizer.
  """
  try:
    data = pathlib.Path(path).read_bytes()
  except OSError as error:
    raise UserError(f'{path}: cannot read the tokenizer model: {error.strerror}') from None
  if data.startswith(byte_pair.SAVED_START):
    return byte_pair.parse_saved(data, str(path))
  return SentencePieceTokenizer(data, name=str(path))


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
  """Trains a BPE model; the same documents give the same bytes.

  All text is used, in memory: on a large corpus pass a part of it (some 100 MB are plenty).
  Characters beyond 99.95 % of the text get no piece of their own, only bytes.

  Args:
    documents: texts of any length.
    vocab_size: number of ids, of which 259 are the byte, newline and control pieces.

  Raises:
    UserError: if vocab_size is too small or too large for the text (the message has the nearest
      valid one), if there is no text, or if a text has a lone surrogate. What iterating over
      documents raises comes through unchanged.
  """
  import sentencepiece
  if vocab_size > _MAX_VOCAB_SIZE:
    raise UserError(f'vocab_size = {vocab_size} must be at most {_MAX_VOCAB_SIZE}')
  model = io.BytesIO()
  failures: list[BaseException] = []
  try:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_keep_failure(_training_sentences(documents), failures),
        model_writer=model,
        model_type='bpe',
        # Below this, sentencepiece fails without naming a valid size.
        vocab_size=max(vocab_size, _FIXED_PIECES),
        byte_fallback=True,
        user_defined_symbols=['\n'],
        normalization_rule_name='identity',
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        # Without a piece for it (text with few spaces) a space would come back as U+2581.
        required_chars=_SPACE,
        max_sentence_length=2**20,  # bytes; above any sentence here, so none is dropped
        unk_id=0, eos_id=1, bos_id=-1, pad_id=-1,
        num_threads=1,
        minloglevel=3)
  except RuntimeError as error:
    if failures:  # sentencepiece turns what the iterator raises into a RuntimeError
      raise failures[0] from None
    raise _training_error(vocab_size, str(error)) from error
  return SentencePieceTokenizer(model.getvalue())


def _training_sentences(documents: Iterable[str]) -> Iterator[str]:
  """Cuts documents into sentences that sentencepiece takes whole."""
  for text in documents:
    check_encodable(text)
    for sentence in _SENTENCE.findall(text):
      # A carriage return at the very end of a sentence is stripped by sentencepiece: a space,
      # which starts a word of its own, keeps it.
      yield sentence + ' ' if sentence.endswith('\r') else sentence


def _keep_failure(items: Iterable[str], failures: list[BaseException]) -> Iterator[str]:
  try:
    yield from items
  except Exception as error:
    failures.append(error)
    raise


def _training_error(vocab_size: int, message: str) -> Exception:
  """Turns sentencepiece's message into a UserError with the nearest valid size."""
  if small := re.search(r'smaller than required_chars\. \d+ vs (\d+)', message):
    return UserError(f'vocab_size = {vocab_size} is too small for this text: it needs '
                     f'{_FIXED_PIECES} byte, newline and control pieces and its characters; '
                     f'the nearest valid is {small[1]}')
  if large := re.search(r'set it to a value <= (\d+)', message):
    return UserError(f'vocab_size = {vocab_size} is too large for this text: it does not have that '
                     f'many pieces; the nearest valid is {large[1]}')
  if 'sentences_.empty()' in message:
    return UserError('no text to train a tokenizer on: the documents are empty')
  return RuntimeError(f'sentencepiece training failed: {message}')


def _piece_bytes(processor, piece_id: int) -> bytes:
  """Returns the UTF-8 bytes that a piece stands for."""
  piece = processor.id_to_piece(piece_id)
  if processor.is_control(piece_id):
    return b''
  if processor.is_unknown(piece_id):
    return '\ufffd'.encode()
  if processor.is_byte(piece_id):
    return bytes([int(piece[3:5], 16)])  # '<0x41>'
  return piece.replace(_SPACE, ' ').encode()
