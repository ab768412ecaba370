"""Packed files, tables, lines, recipes on local files; memory does not grow with a file."""

import gzip
import json
import random
import tracemalloc

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from aogpt_jax.data import corpora, detokenizers, files, online
from aogpt_jax.errors import UserError


def read(path, options=''):
  return list(corpora.read_documents(f'files:{path}{options}'))


def error_line(call):
  with pytest.raises(UserError) as caught:
    call()
  line = str(caught.value)
  assert '\n' not in line
  return line


def write_parquet(path, **columns):
  pa.parquet.write_table(pa.table(columns), path)


def test_zstd_of_several_frames_is_read_to_its_end(tmp_path):
  frames = zstandard.compress(b'one ' * 9999) + zstandard.compress(b'') + zstandard.compress(b'two')
  (tmp_path / 'a.txt.zst').write_bytes(frames)
  assert read(tmp_path / 'a.txt.zst') == ['one ' * 9999 + 'two']


@pytest.mark.parametrize('damage', [
  lambda d: d[:-9], lambda d: d[:len(d) // 2], lambda d: b'plain text', lambda d: d + b'rest',
  lambda d: d + d[:40], lambda d: d[:200] + bytes([d[200] ^ 255]) + d[201:]])
def test_damaged_zstd_is_a_user_error(tmp_path, damage):
  packed = zstandard.ZstdCompressor(write_checksum=True).compress(
      bytes(range(256)) * 40 + ''.join(map(str, range(9999))).encode())
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(damage(packed))
  with pytest.raises(EOFError):
    files._open_zstd(path, 'rb').read()


def test_what_the_codec_finds_is_one_line_with_the_file(tmp_path):
  path = tmp_path / 'a.txt.zst'
  path.write_bytes(zstandard.compress(b'text')[:-1])
  assert f'{path}: not a complete zstd file: it ends within' in error_line(lambda: read(path))
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(zstandard.compress(b'{"text": "a"}\n{"text": "\xff"}'))
  assert f'{path}, line 2: invalid UTF-8 at byte 24' in error_line(lambda: read(path))


def test_parquet_is_one_document_a_row_with_empty_ones(tmp_path):
  path = tmp_path / 'a.parquet'
  texts = [f'{i} \u00e9' * (i % 3) for i in range(1000)]
  write_parquet(path, n=list(range(1000)), text=texts)
  assert read(path) == texts
  write_parquet(path, body=pa.array(['a', 'b', 'a']).dictionary_encode())
  assert read(path, '#field=body') == ['a', 'b', 'a']


def test_bad_parquet_is_one_line(tmp_path):
  path = tmp_path / 'a.parquet'
  write_parquet(path, text=['a', None], n=[1, 2], bytes=[b'a', b'\xff'])
  assert f'{path}, record 2: "text" must be a text, not NoneType' in error_line(lambda: read(path))
  assert f'{path}, record 1: "n" must be a text, not int' in error_line(
      lambda: read(path, '#field=n'))
  assert f'{path}, record 2: "bytes" is invalid UTF-8 at byte 0' in error_line(
      lambda: read(path, '#field=bytes'))
  for function in (corpora.check_corpus, corpora.read_documents):  # at once
    line = error_line(lambda function=function: function(f'files:{path}#field=txt'))
    assert f'{path}: has no field "txt"; valid: text, n, bytes' in line
  whole = path.read_bytes()
  write_parquet(path, text=[f'{i}' * 99 for i in range(9999)])
  middle = bytearray(path.read_bytes())
  middle[1000:2000] = bytes(1000)
  for content in (whole[:-10], b'PAR1' * 9, bytes(middle)):
    path.write_bytes(content)
    assert f'{path}: not a complete parquet file' in error_line(lambda: read(path))


def test_the_field_of_jsonl(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"body": "a", "n": 1}\n{"body": "", "text": "x"}\n')
  assert read(path, '#field=body') == ['a', '']
  assert 'line 1: must be a JSON object with the text in a string field "text"; it has body, n' in (
      error_line(lambda: read(path)))


@pytest.mark.parametrize('suffix', ['', '.gz', '.zst'])
def test_lines_as_documents(tmp_path, suffix):
  pack = {'': bytes, '.gz': gzip.compress, '.zst': zstandard.compress}[suffix]
  path = tmp_path / f'a.txt{suffix}'
  path.write_bytes(pack(' one \r\n\n\u2028two\rmore\n\nlast'.encode()))
  assert read(path, '#document=line') == [' one ', '', '\u2028two\rmore', '', 'last']
  assert read(path, '#document=file') == read(path)
  path.write_bytes(pack(b'one\n\n'))
  assert read(path, '#document=line') == ['one', '']
  path.write_bytes(pack(b'one\n\n\xff\n'))
  assert f'{path}, line 3: invalid UTF-8 at byte 5' in error_line(
      lambda: read(path, '#document=line'))


def test_one_line_of_100_million_characters(tmp_path):
  path = tmp_path / 'a.jsonl.zst'
  with zstandard.open(path, 'wt') as file:
    file.write('{"text": "' + 'a' * 10**8 + '"}\n{"text": "b"}\n')
  documents = corpora.read_documents(f'files:{path}')
  assert len(next(documents)) == 10**8
  assert list(documents) == ['b']


@pytest.mark.parametrize('suffix', ['.jsonl', '.jsonl.gz', '.jsonl.zst', '.txt', '.txt.zst'])
def test_a_file_is_never_in_memory_whole(tmp_path, suffix):
  path = tmp_path / f'a{suffix}'
  count, line = 40_000, json.dumps({'text': 'x' * 500}).encode() + b'\n'
  opener = {'.gz': gzip.open, '.zst': zstandard.open}.get(path.suffix, open)
  with opener(path, 'wb') as file:
    for _ in range(count):
      file.write(line.replace(b'x' * 500, random.randbytes(250).hex().encode()))
  tracemalloc.start()
  try:
    documents = corpora.read_documents(
        f'files:{path}' + '#document=line' * suffix.startswith('.txt'))
    assert sum(1 for _ in documents) == count
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < count * len(line) / 4, peak


def test_a_parquet_file_is_never_in_memory_whole(tmp_path):
  path = tmp_path / 'a.parquet'
  with pa.parquet.ParquetWriter(path, pa.schema([('text', pa.string())]),
                                compression='zstd', use_dictionary=False) as writer:
    for i in range(40):
      writer.write_table(pa.table({'text': [f'{i}' + 'word ' * 200] * 1000}))
  pool = pa.proxy_memory_pool(pa.default_memory_pool())
  before = pa.default_memory_pool()
  pa.set_memory_pool(pool)
  tracemalloc.start()  # of strings; the pool is of arrow's own buffers
  try:
    documents = corpora.read_documents(f'files:{path}')
    assert sum(1 for _ in documents) == 40_000
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
    pa.set_memory_pool(before)
  assert peak < 40e6 / 4
  assert 0 < pool.max_memory() < 40e6 / 4


@pytest.mark.parametrize(('name', 'suffix'), [('.zst', 'zstd'), ('.parquet', 'parquet')])
def test_a_missing_package_is_named_at_once(tmp_path, monkeypatch, name, suffix):
  path = tmp_path / f'a{".txt" if name == ".zst" else ""}{name}'
  path.write_bytes(b'x')
  monkeypatch.setattr(online.importlib.util, 'find_spec', lambda name: None)
  line = error_line(lambda: corpora.check_corpus(f'files:{path}'))
  assert f'{path}: needs the package' in line and f"'aogpt_jax[{suffix}]'" in line


@pytest.mark.parametrize(('options', 'part'), [
  ('#fild=x', 'no option "fild"; did you mean "field"?'),
  ('#split=train', 'no option "split"'),
  ('#document=page', 'document=page must be file or line'),
  ('#detokenize=ptbb', 'detokenize=ptbb: no such detokeniser; did you mean "ptb"?'),
  ('#field=', 'option "field" must have one value'),
  ('#field=a,field=b', 'option "field" must have one value'),
  ('#field=a', 'field=a is of .jsonl and .parquet'),
])
def test_bad_options_are_refused_at_the_call(tmp_path, options, part):
  (tmp_path / 'a.txt').write_text('x')
  spec = f'files:{tmp_path}/a.txt{options}'
  for function in (corpora.check_corpus, corpora.read_documents, corpora.corpus_fingerprint):
    line = error_line(lambda function=function: function(spec))
    assert spec in line and part in line


def test_document_line_needs_a_txt_file(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "a"}\n')
  assert 'document=line is of .txt' in error_line(
      lambda: read(tmp_path / 'a.jsonl', '#document=line'))


def test_a_hash_or_comma_in_a_name_is_no_option(tmp_path):
  (tmp_path / 'a#b, c=d.txt').write_text('x , y')
  assert read(tmp_path / 'a#b, c=d.txt') == ['x , y']
  assert read(tmp_path / 'a#b, c=d.txt', '#detokenize=wikitext') == ['x, y']


def test_every_scheme_takes_a_detokeniser():
  plain = list(corpora.read_documents('embedded:milton'))
  assert list(corpora.read_documents('embedded:milton#detokenize=lambada')) == [
      '\n' + text.replace('\u201c', '"').replace('\u201d', '"').strip() for text in plain]
  assert list(corpora.read_documents('embedded:milton:test#detokenize=none')) == plain


LINES = " = A title = \n \n it 's N N \n\n"


@pytest.mark.parametrize(('recipe', 'rows'), [
  ('ptb', ['= A title =', '', "it 's N N", '']),
  ('lm1b', ['= A title =', '', "it 's N N", '']),
  ('wikitext2', [' = A title = \n', '', " it 's N N \n", '']),
  ('wikitext103', [' = A title = \n', '', " it 's N N \n", '']),
  ('openwebtext', [LINES]),
])
def test_recipes_read_local_text_as_the_repositories_have_it(tmp_path, recipe, rows):
  (tmp_path / 'a.txt').write_text(LINES)
  name = corpora.RECIPES[recipe].detokenize
  change = detokenizers.DETOKENIZERS[name]
  assert list(corpora.read_documents(f'{recipe}#path={tmp_path}/*.txt')) == [*map(change, rows)]
  assert list(corpora.read_documents(f'{recipe}#path={tmp_path}/a.txt,detokenize=none')) == rows
  lines = LINES.split('\n')[:-1]
  if recipe == 'openwebtext':
    spec = f'openwebtext#path={tmp_path}/a.txt,document=line'
    assert list(corpora.read_documents(spec)) == lines
  (tmp_path / 'a.jsonl').write_text('{"text": " a , b N . "}\n')
  spec = f'{recipe}#path={tmp_path}/a.jsonl'
  assert list(corpora.read_documents(spec)) == [change(' a , b N . ')]


def test_lambada_is_the_jsonl_file_of_gpt2(tmp_path):
  (tmp_path / 'lambada_test.jsonl').write_text('{"text": "\\u201cYes,\\u201d he said. "}\n')
  assert list(corpora.read_documents(f'lambada#path={tmp_path}/lambada_test.jsonl')) == [
      '\n"Yes," he said.']


def test_a_recipe_refuses_what_it_does_not_have(tmp_path):
  (tmp_path / 'a.txt').write_text('x')
  for spec, part in ((f'ptb#path={tmp_path}/a.txt,split=test', 'no option "split"'),
                     ('ptb#data_dir=x', 'no option "data_dir"'),
                     ('ptbb', 'did you mean "ptb"?'), ('wikitext', 'did you mean "wikitext'),
                     ('files', 'did you mean "files:"?')):
    assert part in error_line(lambda spec=spec: corpora.check_corpus(spec))


def test_the_recipes_are_the_papers():
  splits = {name: (recipe.split, recipe.detokenize) for name, recipe in corpora.RECIPES.items()}
  assert splits == {
      'openwebtext': ('train', 'none'), 'wikitext2': ('train', 'wikitext'),
      'wikitext103': ('test', 'wikitext'), 'ptb': ('test', 'ptb'), 'lm1b': ('test', 'lm1b'),
      'lambada': ('test', 'lambada')}


def test_fingerprints_follow_the_options_that_change_documents(tmp_path):
  (tmp_path / 'a.txt').write_text(LINES)
  (tmp_path / 'b.jsonl').write_text('{"text": "a", "body": "b"}\n')
  (tmp_path / 'copy.txt').write_text(LINES)
  spec = f'files:{tmp_path}/a.txt'
  different = [spec, f'{spec}#document=line', f'{spec}#detokenize=ptb',
               f'{spec}#document=line,detokenize=ptb', f'ptb#path={tmp_path}/a.txt',
               f'wikitext2#path={tmp_path}/a.txt', f'files:{tmp_path}/b.jsonl',
               f'files:{tmp_path}/b.jsonl#field=body']
  assert len(set(map(corpora.corpus_fingerprint, different))) == len(different)
  for other in (f'{spec}#document=file', f'{spec}#detokenize=none', f'files:{tmp_path}/copy.txt',
                f'openwebtext#path={tmp_path}/a.txt'):
    assert corpora.corpus_fingerprint(other) == corpora.corpus_fingerprint(spec)
