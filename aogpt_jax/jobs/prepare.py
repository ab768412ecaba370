"""--mode=prepare: tokenizes and packs the corpora of a config, so that train finds them ready."""

import itertools
import os
import pathlib
from collections.abc import Iterable

from aogpt_jax import config as config_lib, data
from aogpt_jax.config import Config
from aogpt_jax.data import corpora, packing, tokenizers, trained


def check(config: Config) -> None:
  """Everything about data that can be known to be wrong before reading it."""
  if config.data.tokenizer == 'sentencepiece':
    config_lib.check(
        config.data.vocab_size <= config.model.vocab_size, 'model.vocab_size',
        config.model.vocab_size,
        f'must be at least the data.vocab_size={config.data.vocab_size} of the tokenizer')
  for spec in (config.data.train, config.data.validation):
    corpora.check_corpus(spec)


def directory(config: Config, workdir: pathlib.Path) -> pathlib.Path:
  """Where the prepared data of a run lies."""
  return pathlib.Path(os.path.expanduser(config.data.directory or workdir / 'data'))


def tokenizer(config: Config, workdir: pathlib.Path) -> tokenizers.ByteTokenizer:
  """The run's tokenizer: from its directory, the one the config names, or trained."""
  path = workdir / 'tokenizer.model'
  # Where the name always means the same, a run that has its copy needs no cache and no network.
  own = path.exists() and config.data.tokenizer in ('gpt2', 'bytes')
  if config.data.tokenizer != 'sentencepiece' and not own:
    found = tokenizers.make_tokenizer(config.data.tokenizer)
    config_lib.check(
        not path.exists() or tokenizers.load_tokenizer(path).fingerprint == found.fingerprint,
        'data.tokenizer', config.data.tokenizer,
        f'differs from {path}, with which this run was started')
  elif path.exists():
    found = tokenizers.load_tokenizer(path)
    config_lib.check(own or found.vocab_size == config.data.vocab_size, 'data.vocab_size',
                     config.data.vocab_size, f'must be {found.vocab_size}, as {path} has, with '
                     'which this run was started; or choose another --workdir')
  else:
    found = trained.load_or_train(directory(config, workdir), config.data.train,
                                  config.data.vocab_size)
  config_lib.check(
      found.vocab_size <= config.model.vocab_size, 'model.vocab_size', config.model.vocab_size,
      f'must be at least the {found.vocab_size} ids of the tokenizer')
  return found


def blocks(config: Config, workdir: pathlib.Path, tokenizer: packing.Tokenizer,
           ) -> tuple[packing.PreparedData, packing.PreparedData]:
  """The prepared data.train and data.validation."""
  folder, length = directory(config, workdir), config.model.context_length
  train, validation = (data.prepare(folder, spec, tokenizer, length, config.data.workers)
                       for spec in (config.data.train, config.data.validation))
  return train, validation


def table(prepared: Iterable[packing.PreparedData]) -> str:
  """Markdown, one row a corpus."""
  names = ('corpus', 'documents', 'empty', 'tokens', 'blocks', 'bytes/token', 'MB/s', 'fingerprint',
           'directory')
  rows = [(p.corpus, f'{p.num_documents:,}', f'{p.num_empty_documents:,}', f'{p.num_tokens:,}',
           f'{p.num_blocks:,}', f'{p.bytes_per_token:.3f}',
           f'{p.num_bytes / 1e6 / p.seconds:.1f}' if p.fresh else 'was ready',
           p.corpus_fingerprint[:12], str(p.directory)) for p in prepared]
  return '\n'.join('| ' + ' | '.join(row) + ' |'
                   for row in itertools.chain([names, ('---',) * len(names)], rows))


def run(config: Config, workdir: pathlib.Path) -> None:
  """Prepares both corpora, or what an interrupted call left of them, and prints a table.

  Raises:
    UserError: for a bad corpus or directory, or a tokenizer that does not fit the model.
  """
  check(config)
  config_lib.check(not workdir.exists() or workdir.is_dir(), '--workdir', str(workdir),
                   'is a file, must be a directory')
  prepared = blocks(config, workdir, tokenizer(config, workdir))
  if not any(p.fresh for p in prepared):
    print('The data is ready: nothing was left to do.')
  print(table(prepared))
