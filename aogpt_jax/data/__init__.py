"""Documents -> token ids -> packed blocks -> batches; every name is loaded at its first use."""

import importlib
from typing import Any

_HOME = {
  'read_documents': 'corpora',
  'check_corpus': 'corpora',
  'corpus_fingerprint': 'corpora',
  'RECIPES': 'corpora',
  'detokenize': 'detokenizers',
  'SentencePieceTokenizer': 'tokenizers',
  'train_sentencepiece': 'tokenizers',
  'load_tokenizer': 'tokenizers',
  'make_tokenizer': 'tokenizers',
  'pack': 'packing',
  'prepare': 'packing',
  'open_blocks': 'packing',
  'train_batches': 'loader',
  'eval_batches': 'loader',
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_HOME])
