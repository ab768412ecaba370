"""AO-GPT in JAX: one decoder that generates tokens in any order (arXiv 2506.19935)."""

import importlib
from typing import Any

__version__ = '0.1.0'

# Loaded at first use: importing the package must not import jax, so that --help is instant.
_SUBMODULES = ('config', 'data', 'evaluation', 'interop', 'keys', 'lm', 'masks', 'model',
               'objective', 'orders', 'sampling', 'sharding', 'training')
_NAMES = {'load': 'lm', 'LanguageModel': 'lm', 'UserError': 'errors'}
__all__ = ['__version__', *_SUBMODULES, *_NAMES]


def __getattr__(name: str) -> Any:
  if name in _SUBMODULES:
    return importlib.import_module(f'aogpt_jax.{name}')
  if name in _NAMES:
    return getattr(importlib.import_module(f'aogpt_jax.{_NAMES[name]}'), name)
  raise AttributeError(f'module "aogpt_jax" has no attribute {name!r}')


def __dir__() -> list[str]:
  return __all__
