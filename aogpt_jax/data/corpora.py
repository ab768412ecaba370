"""Where documents come from: the text that ships with the package, files, or a public dataset.

A corpus is named by a spec, `SCHEME:REST[#key=value,key=value]`:

  embedded:shakespeare:train   NAME[:SPLIT] of the package's own text; the split may be left out
                               where there is only one (`embedded:milton`)
  files:texts/**/*.jsonl.gz    a glob; files are read in sorted order. `.txt` is one document a file
                               (`document=line`: one a line), `.jsonl` one a line, `.parquet` one a
                               row; .txt and .jsonl may end in `.gz` or `.zst`. Options: field (of
                               .jsonl and .parquet, default "text"), document (file or line)
  tfds:my_data/1.0.0           a directory of a prepared TFDS dataset, or NAME[/CONFIG]. Options:
                               split, field, data_dir
  hf:Salesforce/wikitext/wikitext-2-raw-v1
                               OWNER/NAME[/CONFIG] of the Hugging Face hub, or a local directory
                               (`save_to_disk`, or data files). Options: split, field, revision

or by the name of a recipe in `RECIPES`: `wikitext103`, `wikitext2#split=test`. A recipe takes the
options of `hf:`; with `path=GLOB` it reads local files instead, with those of `files:`, and treats
them as its own text (`ptb#path=data/ptb.test.txt`; .txt is one document a line, except for
openwebtext).

Every spec takes `detokenize=wikitext|ptb|lm1b|lambada|none`. Text is UTF-8, without any change to
newlines or spaces but a detokeniser's. An empty document is a document.
"""

import dataclasses
import glob
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

from aogpt_jax.data import detokenizers, digests, files, hubs
from aogpt_jax.errors import UserError, nearest

_EMBEDDED = pathlib.Path(__file__).parent / 'embedded'
_OPTIONS = {
  'embedded': ('detokenize',),
  'files': ('field', 'document', 'detokenize'),
  'tfds': ('split', 'field', 'data_dir', 'detokenize'),
  'hf': ('split', 'field', 'revision', 'detokenize'),
}
_CONVERTED = 'refs/convert/parquet'  # where the hub keeps what a loading script used to make


def _wikitext_line(line: str) -> str:
  """A line as the dataset's rows have it: with its newline, but nothing for a blank one."""
  return line + '\n' if line.strip() else ''


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A public corpus as the paper used it.

  Attributes:
    source: spec of the repository; the data is what it holds, not part of this package.
    split: the paper's; for wikitext2 that is train (`wikitext2#split=test` for the usual one).
    field: of the repository.
    detokenize: see `detokenizers`.
    document: what a document of a local .txt file is.
    clean: what makes a row of the repository out of a line of a local .txt file.
    revision: of the repository.
  """

  source: str
  split: str
  field: str = 'text'
  detokenize: str = 'none'
  document: str = 'line'
  clean: Callable[[str], str] = str
  revision: str = ''


RECIPES = {
  'openwebtext': Recipe('hf:Skylion007/openwebtext', 'train', document='file'),
  'wikitext2': Recipe('hf:Salesforce/wikitext/wikitext-2-raw-v1', 'train', detokenize='wikitext',
                      clean=_wikitext_line),
  'wikitext103': Recipe('hf:Salesforce/wikitext/wikitext-103-raw-v1', 'test',
                        detokenize='wikitext', clean=_wikitext_line),
  'ptb': Recipe('hf:ptb-text-only/ptb_text_only', 'test', field='sentence', detokenize='ptb',
                clean=str.strip, revision=_CONVERTED),
  'lm1b': Recipe('hf:billion-word-benchmark/lm1b', 'test', detokenize='lm1b', clean=str.strip,
                 revision=_CONVERTED),
  # GPT-2's own lambada_test.jsonl, under its own name on the hub.
  'lambada': Recipe('hf:EleutherAI/lambada_openai', 'test', detokenize='lambada'),
}


def read_documents(spec: str) -> Iterator[str]:
  """Checks the corpus (and downloads it, where it is one to download), then reads it.

  Args:
    spec: see the module's page.

  Returns:
    A generator of the documents as str, in the same order each time. A document may be empty;
    blank lines of a .jsonl file are skipped. Every document can be encoded as UTF-8.

  Raises:
    UserError: at the call for all that `check_corpus` finds; while reading, with file and line or
      record, for a file that is empty or whitespace only, invalid UTF-8, a bad JSON line, a missing
      field, a truncated or damaged file.
  """
  source, detokenize = _open(spec, download=True)
  change = detokenizers.DETOKENIZERS[detokenize]
  return (change(document) for document in source.read())


def check_corpus(spec: str) -> None:
  """Checks everything that can be known without reading or downloading the corpus.

  Raises:
    UserError: for an unknown scheme, name, split, field or option; a glob that matches no file; a
      suffix that is not read; a file that cannot be opened or has zero bytes; a package that is
      missing; a dataset that is not here, if there is no network.
  """
  _open(spec, download=False)


def corpus_files(spec: str) -> Sequence[pathlib.Path]:
  """The files that a corpus is read from, in order; none where it is still to be downloaded."""
  source, _ = _open(spec, download=False)
  return source.files if source else ()


def corpus_fingerprint(spec: str) -> str:
  """Returns a sha256 (hex) that is equal for equal text, read in the same way.

  It covers the bytes of the corpus' files, in order, and the options that change the documents
  (field, document, detokenize), not where the files lie. For a TFDS dataset and a local Hugging
  Face one the files are those that hold the records, and split and field count too. For a
  repository of the Hugging Face hub it covers name, configuration, split and field and the
  fingerprint that `datasets` derives from the repository's commit. The digests of large files are
  remembered, see `digests`.
  """
  source, detokenize = _open(spec, download=True)
  identity = source.identity + ((f'detokenize={detokenize}',) if detokenize != 'none' else ())
  total = hashlib.sha256()
  for digest in digests.file_digests(source.files):
    # One digest a file: moving bytes from the end of one to the start of the next must show.
    total.update(digest)
  if identity:
    total.update(json.dumps(identity).encode())
  return total.hexdigest()


def _open(spec: str, download: bool) -> tuple[files.Source | None, str]:
  """Returns the corpus, None if it is to be downloaded, and the name of its detokeniser."""
  name, options = _split_options(spec)
  scheme, colon, rest = name.partition(':')
  if not colon:
    return _open_recipe(spec, name, options, download)
  if scheme not in _OPTIONS:
    raise UserError(f'corpus "{spec}": unknown scheme "{scheme}"{nearest(scheme, _OPTIONS)}')
  _check_options(spec, options, _OPTIONS[scheme])
  detokenize = options.pop('detokenize', 'none')
  if scheme == 'embedded':
    return files.open_files(_embedded_paths(spec, rest)), detokenize
  if scheme == 'files':
    return _open_glob(spec, rest, options), detokenize
  options = {key: options.get(key, 'text' if key == 'field' else '')
             for key in _OPTIONS[scheme] if key != 'detokenize'}
  if not rest:
    raise UserError(f'corpus "{spec}": names no dataset; such as {scheme}:NAME or '
                    f'{scheme}:DIRECTORY')
  open_hub = hubs.open_tfds if scheme == 'tfds' else hubs.open_hf
  return open_hub(spec, rest, **options, download=download), detokenize


def _open_recipe(spec: str, name: str, options: dict[str, str], download: bool,
                 ) -> tuple[files.Source | None, str]:
  if name not in RECIPES:
    names = [*RECIPES, *(f'{scheme}:' for scheme in _OPTIONS)]
    file_like = any(mark in name for mark in './*')
    raise UserError(f'corpus "{spec}" must be SCHEME:NAME or a recipe'
                    + (f'; did you mean "files:{spec}"?' if file_like else nearest(name, names)))
  recipe = RECIPES[name]
  scheme = 'files' if 'path' in options else 'hf'
  _check_options(spec, options, (*_OPTIONS[scheme], 'path'))
  detokenize = options.pop('detokenize', recipe.detokenize)
  if scheme == 'files':
    return _open_glob(spec, options.pop('path'), options, recipe), detokenize
  options = {'split': recipe.split, 'field': recipe.field, 'revision': recipe.revision, **options}
  location = recipe.source.removeprefix('hf:')
  return hubs.open_hf(spec, location, **options, download=download), detokenize


def _split_options(spec: str) -> tuple[str, dict[str, str]]:
  """'NAME#a=b,c=d' -> NAME and the options; a '#' that no 'key=' follows belongs to the name."""
  found = re.search(r'#(?=\w+=)', spec)
  if not found:
    return spec, {}
  options: dict[str, str] = {}
  for part in re.split(r',(?=\w+=)', spec[found.end():]):
    key, _, value = part.partition('=')
    if key in options or not value:
      raise UserError(f'corpus "{spec}": option "{key}" must have one value')
    options[key] = value
  return spec[:found.start()], options


def _check_options(spec: str, options: dict[str, str], valid: tuple[str, ...]) -> None:
  for key in options:
    if key not in valid:
      raise UserError(f'corpus "{spec}": has no option "{key}"{nearest(key, valid)}')
  if options.get('document', 'file') not in ('file', 'line'):
    raise UserError(f'corpus "{spec}": document={options["document"]} must be file or line')
  try:
    detokenizers.check_detokenizer(options.get('detokenize', 'none'))
  except UserError as error:
    raise UserError(f'corpus "{spec}": {error}') from None


def _embedded_paths(spec: str, rest: str) -> list[pathlib.Path]:
  splits: dict[str, dict[str, pathlib.Path]] = {}
  for path in sorted(_EMBEDDED.glob('*.jsonl.gz')):
    name, _, split = path.name.removesuffix('.jsonl.gz').rpartition('-')
    splits.setdefault(name, {})[split] = path
  name, colon, split = rest.partition(':')
  if name not in splits:
    raise UserError(f'corpus "{spec}": unknown embedded text "{name}"{nearest(name, splits)}')
  if not colon and len(splits[name]) > 1:
    raise UserError(f'corpus "{spec}": name a split of "{name}"; valid: '
                    f'{", ".join(f"embedded:{name}:{s}" for s in splits[name])}')
  if not colon:
    return list(splits[name].values())
  if split not in splits[name]:
    raise UserError(f'corpus "{spec}": "{name}" has no split "{split}"; '
                    f'valid: {", ".join(splits[name])}')
  return [splits[name][split]]


def _open_glob(spec: str, pattern: str, options: dict[str, str], recipe: Recipe | None = None,
               ) -> files.Source:
  paths = _glob_paths(spec, pattern)
  text = [files.is_text(path) for path in paths]
  if all(text) and 'field' in options:
    raise UserError(f'corpus "{spec}": field={options["field"]} is of .jsonl and .parquet, and all '
                    'files are .txt; leave it out')
  if not any(text) and options.get('document') == 'line':
    raise UserError(f'corpus "{spec}": document=line is of .txt, and no file is; leave it out')
  document = recipe.document if recipe and any(text) else 'file'
  return files.open_files(paths, options.get('field', 'text'), options.get('document', document),
                          recipe.clean if recipe else str)


def _glob_paths(spec: str, pattern: str) -> list[pathlib.Path]:
  pattern = os.path.expanduser(pattern)
  # A path that exists is meant literally, even where its name has glob characters.
  found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
  paths = sorted(path for path in map(pathlib.Path, found) if not path.is_dir())
  if not paths:
    inside = ' (a folder: append "/*.txt")' if os.path.isdir(pattern) else ''
    raise UserError(f'corpus "{spec}": no file matches "{pattern}"{inside}; '
                    f'looked from {os.getcwd()}')
  return paths
