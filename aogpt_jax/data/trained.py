"""A tokenizer trained on the beginning of a corpus, and kept beside the data."""

import hashlib
import logging
import pathlib
from collections.abc import Iterable, Iterator

from aogpt_jax.data import corpora, tokenizers

# Characters that a tokenizer is trained on: the first ones. A smaller corpus is used whole; of a
# larger one more would cost hours and memory, and change few of the pieces.
SAMPLE_CHARACTERS = 2**26
log = logging.getLogger(__name__)


def load_or_train(folder: pathlib.Path, corpus: str, vocab_size: int,
                  ) -> tokenizers.SentencePieceTokenizer:
  """Trains a BPE on the first SAMPLE_CHARACTERS of a corpus, or finds it from an earlier call.

  Args:
    folder: holds the model, named after a hash of what it is trained on.
    corpus: a spec, see `corpora`.
    vocab_size: number of ids.

  Raises:
    UserError: for a bad corpus, a vocab_size that does not fit it, a damaged model in the folder.
  """
  import sentencepiece
  digest = hashlib.sha256(f'{sentencepiece.__version__} {vocab_size}'.encode())
  for text in _sample(corpora.read_documents(corpus)):
    digest.update(hashlib.sha256(text.encode('utf-8')).digest())
  path = folder / f'tokenizer-{vocab_size}-{digest.hexdigest()[:12]}.model'
  if path.exists():
    return tokenizers.load_tokenizer(path)
  log.info('training a tokenizer of %d ids on %s', vocab_size, corpus)
  tokenizer = tokenizers.train_sentencepiece(_sample(corpora.read_documents(corpus)), vocab_size)
  tokenizer.save(path)
  return tokenizer


def _sample(documents: Iterable[str]) -> Iterator[str]:
  left = SAMPLE_CHARACTERS
  for document in documents:
    yield document[:left]
    left -= len(document)
    if left <= 0:
      return
