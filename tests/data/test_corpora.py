"""The corpora: what is read, in which order, and the one line for each thing wrong with a file."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from aogpt_jax.data import corpora
from aogpt_jax.errors import UserError


def read(pattern):
  return list(corpora.read_documents(f'files:{pattern}'))


def error_line(call):
  with pytest.raises(UserError) as caught:
    call()
  line = str(caught.value)
  assert '\n' not in line
  return line


def test_embedded_texts_are_there_and_differ():
  texts = {spec: list(corpora.read_documents(spec)) for spec in
           ['embedded:shakespeare:train', 'embedded:shakespeare:validation', 'embedded:milton']}
  assert [len(documents) for documents in texts.values()] == [39, 3, 2]
  assert texts['embedded:milton'][0].startswith('PARADISE LOST\nBOOK I.\n\n  Of Mans First')
  assert list(corpora.read_documents('embedded:milton:test')) == texts['embedded:milton']
  validation = set(texts['embedded:shakespeare:validation'])
  assert validation.isdisjoint(texts['embedded:shakespeare:train'])


def test_txt_is_one_document_unchanged_and_files_are_sorted(tmp_path, monkeypatch):
  # The file system's own order may happen to be the sorted one.
  find = corpora.glob.glob
  monkeypatch.setattr(corpora.glob, 'glob', lambda *a, **k: sorted(find(*a, **k), reverse=True))
  exact = ' two\r\nlines \n\n\u00e9\t'
  for name in ['b.txt', 'a.txt.gz', 'c.txt']:
    opener = gzip.open if name.endswith('.gz') else open
    with opener(tmp_path / name, 'wb') as file:
      file.write(f'{name}{exact}'.encode())
  assert read(tmp_path / '*') == [f'{name}{exact}' for name in ['a.txt.gz', 'b.txt', 'c.txt']]


def test_jsonl_is_one_document_a_line_and_skips_blank_lines(tmp_path):
  lines = '{"text": "one\\n", "n": 1}\n\n{"text": ""}\n{"text": "three"}'
  (tmp_path / 'a.jsonl').write_text(lines)
  with gzip.open(tmp_path / 'b.jsonl.gz', 'wt') as file:
    file.write(lines)
  assert read(tmp_path / '*') == ['one\n', '', 'three'] * 2


def test_glob_recurses_skips_folders_and_takes_an_existing_path_literally(tmp_path):
  (tmp_path / 'deep' / 'x.txt').mkdir(parents=True)
  (tmp_path / 'deep' / '[1].txt').write_text('one')
  assert read(tmp_path / '**' / '*.txt') == ['one']
  assert read(tmp_path / 'deep' / '[1].txt') == ['one']


@pytest.mark.parametrize(('spec', 'parts'), [
  ('nonsense.txt', ['"nonsense.txt"', 'did you mean "files:nonsense.txt"?']),
  ('embeded:milton', ['"embeded"', 'did you mean "embedded"?']),
  ('embedded:shakespear:train', ['"shakespear"', 'did you mean "shakespeare"?']),
  ('embedded:', ['unknown embedded text ""', 'milton, shakespeare']),
  ('embedded:shakespeare', ['embedded:shakespeare:train, embedded:shakespeare:validation']),
  ('embedded:shakespeare:test', ['no split "test"', 'train, validation']),
  ('embedded:milton:train', ['no split "train"', 'valid: test']),
  ('files:', ['no file matches ""']),
])
def test_a_bad_spec_is_refused_at_the_call(spec, parts):
  for function in [corpora.check_corpus, corpora.read_documents, corpora.corpus_fingerprint]:
    line = error_line(lambda function=function: function(spec))
    assert all(part in line for part in [spec, *parts])


def test_cheap_checks_are_eager_and_name_the_file(tmp_path):
  def check(name):
    return error_line(lambda: corpora.read_documents(f'files:{tmp_path / name}'))

  assert 'no file matches' in check('*.txt')
  assert 'append "/*.txt"' in check('')
  (tmp_path / 'zero.txt').touch()
  assert f'{tmp_path}/zero.txt: the file is empty' in check('zero.txt')
  (tmp_path / 'a.csv').write_text('x')
  assert f'{tmp_path}/a.csv: the suffix must be one of .txt' in check('a.csv')
  os.symlink(tmp_path / 'nowhere', tmp_path / 'link.txt')
  assert f'{tmp_path}/link.txt: cannot be read: No such file' in check('l*.txt')


@pytest.mark.parametrize(('name', 'data', 'part'), [
  ('a.txt', b' \n\t ', ': the file is empty or whitespace only'),
  ('a.txt.gz', b' \n', ': the file is empty or whitespace only'),
  ('a.txt.gz', b'', ': the file is empty or whitespace only'),
  ('a.jsonl', b'\n \n', ': the file is empty or whitespace only'),
  ('a.jsonl', b'{"text": " "}\n', ': the file is empty or whitespace only'),
  ('a.txt', b'abc\xff', ': invalid UTF-8 at byte 3'),
  ('a.txt.gz', b'\xc3\xa9\xc3', ': invalid UTF-8 at byte 2'),
  ('a.jsonl', b'{"text": "a"}\n{"text": "\xff"}', ', line 2: invalid UTF-8 at byte 24'),
  ('a.jsonl.gz', b'{"text": "a"}\n{"text": "\xff"}', ', line 2: invalid UTF-8 at byte 24'),
  ('a.jsonl', b'{"text": "a"}\n\n{"text": ', ', line 3: not valid JSON'),
  ('a.jsonl', b'[' * 100000, ', line 1: not valid JSON'),
  ('a.jsonl', b'{"text": "a"}\n{"txt": "a"}', ', line 2: must be a JSON object'),
  ('a.jsonl', b'{"text": 1}', ', line 1: must be a JSON object'),
  ('a.jsonl', b'["text"]', ', line 1: must be a JSON object'),
  ('a.jsonl', b'{"text": "a\\ud800"}', ', line 1: "text" has a lone surrogate at character 1'),
])
def test_bad_content_is_one_line_with_the_place(tmp_path, name, data, part):
  path = tmp_path / name
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  assert f'{path}{part}' in error_line(lambda: read(path))


@pytest.mark.parametrize('damage', [lambda d: d[:-9], lambda d: b'plain text', lambda d:
                                    d[:20] + bytes([d[20] ^ 255]) + d[21:]])
def test_damaged_gzip_is_a_user_error(tmp_path, damage):
  path = tmp_path / 'a.txt.gz'
  path.write_bytes(damage(gzip.compress(os.urandom(1000).hex().encode())))
  assert f'{path}: not a complete gzip file' in error_line(lambda: read(path))


def test_the_documents_before_a_bad_line_are_given(tmp_path):
  (tmp_path / 'a.jsonl').write_text(json.dumps({'text': 'good'}) + '\nbad')
  documents = corpora.read_documents(f'files:{tmp_path}/a.jsonl')
  assert next(documents) == 'good'
  with pytest.raises(UserError):
    next(documents)


def test_the_fingerprint_follows_the_bytes_and_the_file_boundaries(tmp_path):
  def fingerprint(first, second):
    (tmp_path / 'a.txt').write_text(first)
    (tmp_path / 'b.txt').write_text(second)
    return corpora.corpus_fingerprint(f'files:{tmp_path}/*.txt')

  assert fingerprint('ab', 'c') == fingerprint('ab', 'c')
  assert len({fingerprint('ab', 'c'), fingerprint('a', 'bc'), fingerprint('ab', 'd')}) == 3


def test_importing_the_package_is_light():
  code = ('import sys, aogpt_jax.data, aogpt_jax.data.corpora, aogpt_jax.data.tokenizers, '
          'aogpt_jax.data.packing, aogpt_jax.data.loader, aogpt_jax.data.hubs\n'
          'heavy = {"tensorflow", "torch", "jax", "grain", "tensorflow_datasets", '
          '"sentencepiece", "tiktoken", "datasets", "pyarrow", "zstandard", "urllib.request"}\n'
          'print(sorted(heavy & set(sys.modules)))')
  result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert result.stdout.strip() == '[]'


def test_the_lazy_names_are_the_functions_themselves():
  import aogpt_jax.data
  from aogpt_jax.data import detokenizers, loader, packing, tokenizers
  for module, names in {corpora: ['read_documents', 'check_corpus', 'corpus_fingerprint',
                                  'RECIPES'],
                        detokenizers: ['detokenize'],
                        tokenizers: ['SentencePieceTokenizer', 'train_sentencepiece',
                                     'load_tokenizer', 'make_tokenizer'],
                        packing: ['pack', 'prepare', 'open_blocks'],
                        loader: ['train_batches', 'eval_batches']}.items():
    for name in names:
      assert getattr(aogpt_jax.data, name) is getattr(module, name)
      assert name in dir(aogpt_jax.data)
  with pytest.raises(AttributeError, match='no attribute .nonsense.'):
    _ = aogpt_jax.data.nonsense
