"""The same documents from every kind of source, and one line at once for what is not there."""

import gzip
import json
import shutil
import sys
import time

import numpy as np
import pytest

from aogpt_jax import data
from aogpt_jax.data import hubs, online
from aogpt_jax.errors import UserError

DOCUMENTS = ['One, two.\n', '', 'three \u00e9 \u65e5\u672c\0', '  spaced  \r\n', 'x' * 1000] * 30


def error_line(call):
  with pytest.raises(UserError) as caught:
    call()
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.fixture(scope='module')
def tfds_directory(tmp_path_factory):
  """A dataset with splits train and test, as TFDS prepares it, without TensorFlow."""
  import tensorflow_datasets as tfds

  class AogptTexts(tfds.core.GeneratorBasedBuilder):
    """Texts."""

    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(
          builder=self, disable_shuffling=True,
          features=tfds.features.FeaturesDict({
              'text': tfds.features.Text(), 'n': tfds.features.Scalar(dtype=np.int32)}))

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples(DOCUMENTS),
              'test': self._generate_examples(DOCUMENTS[:3])}

    def _generate_examples(self, documents):
      for n, text in enumerate(documents):
        yield n, {'text': text, 'n': n}

  builder = AogptTexts(data_dir=tmp_path_factory.mktemp('tfds'), file_format='array_record')
  builder.download_and_prepare(
      download_config=tfds.download.DownloadConfig(try_download_gcs=False))
  return builder.data_path


@pytest.fixture(scope='module')
def hf_directory(tmp_path_factory):
  import datasets
  folder = tmp_path_factory.mktemp('hf')
  columns = {'text': DOCUMENTS, 'n': list(range(len(DOCUMENTS)))}
  train = datasets.Dataset.from_dict(columns)
  train.save_to_disk(folder / 'one')
  datasets.DatasetDict(train=train, test=train.select(range(3))).save_to_disk(folder / 'two')
  (folder / 'files').mkdir()
  train.to_parquet(folder / 'files' / 'train.parquet')
  return folder


@pytest.fixture(autouse=True)
def hf_cache(monkeypatch, tmp_path):
  import datasets
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'hf_cache')
  return tmp_path / 'hf_cache'


def specs(tmp_path, tfds_directory, hf_directory):
  import pyarrow as pa
  import pyarrow.parquet
  import zstandard
  lines = ''.join(json.dumps({'text': text}) + '\n' for text in DOCUMENTS).encode()
  (tmp_path / 'a.jsonl').write_bytes(lines)
  (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(lines))
  (tmp_path / 'a.jsonl.zst').write_bytes(zstandard.compress(lines))
  pa.parquet.write_table(pa.table({'text': DOCUMENTS}), tmp_path / 'a.parquet')
  return [*(f'files:{tmp_path}/a.{kind}' for kind in ('jsonl', 'jsonl.gz', 'jsonl.zst', 'parquet')),
          f'tfds:{tfds_directory}#split=train',
          f'tfds:aogpt_texts#split=train,data_dir={tfds_directory.parents[1]}',
          *(f'hf:{hf_directory}/{name}' for name in ('one', 'two#split=train', 'files'))]


def test_every_source_gives_the_same_documents_and_blocks(tmp_path, tfds_directory, hf_directory):
  tokenizer = data.make_tokenizer('bytes')
  wanted = np.stack(list(data.pack(DOCUMENTS, tokenizer, 32)))
  for spec in specs(tmp_path, tfds_directory, hf_directory):
    data.check_corpus(spec)
    assert list(data.read_documents(spec)) == DOCUMENTS, spec
    blocks = np.stack(list(data.pack(data.read_documents(spec), tokenizer, 32)))
    np.testing.assert_array_equal(blocks, wanted)
  assert 'tensorflow' not in sys.modules


def test_splits_and_parts_of_splits(tfds_directory, hf_directory):
  for spec in (f'tfds:{tfds_directory}#split=test', f'tfds:{tfds_directory}#split=train[:3]',
               f'hf:{hf_directory}/two#split=test', f'hf:{hf_directory}/files#split=train[:3]'):
    assert list(data.read_documents(spec)) == DOCUMENTS[:3], spec
  spec = f'hf:{hf_directory}/two#split=test,detokenize=lambada'
  assert list(data.read_documents(spec)) == [
      '\n' + text.strip() for text in DOCUMENTS[:3]]


@pytest.mark.parametrize(('spec', 'parts'), [
  ('tfds:{tfds}', ['name a split', 'valid: train, test']),
  ('tfds:{tfds}#split=tset', ["'tset'", 'train', 'test']),
  ('tfds:{tfds}#split=test,field=txt', ['no field "txt"', 'valid: ', 'text']),
  ('tfds:{tfds}/..#split=test', ['no prepared TFDS dataset', 'did you mean "tfds:', '1.0.0"?']),
  ('tfds:/no/such', ['no prepared TFDS dataset', '"/no/such"']),
  ('tfds:no_such_name', ['no dataset "no_such_name"']),
  ('tfds:lm1bb', ['did you mean "lm1b"']),
  ('tfds:imdb_reviews/nope', ['BuilderConfig nope not found']),
  ('tfds:', ['names no dataset']),
  ('tfds:x#revision=1', ['no option "revision"']),
  ('hf:{hf}/two', ['name a split', 'valid: train, test']),
  ('hf:{hf}/two#split=tset', ['no split "tset"', 'train, test']),
  ('hf:{hf}/one#split=train', ['has no splits']),
  ('hf:{hf}/one#field=txt', ['no field "txt"', 'text, n']),
  ('hf:{hf}/files#split=tset', ['"tset"', 'train']),
  ('hf:/no/such', ['no directory "/no/such"']),
  ('hf:a/b/c/d', ['must be NAME, OWNER/NAME']),
])
def test_a_bad_name_is_refused_at_the_call(spec, parts, tfds_directory, hf_directory):
  spec = spec.format(tfds=tfds_directory, hf=hf_directory)
  for function in (data.check_corpus, data.read_documents, data.corpus_fingerprint):
    line = error_line(lambda function=function: function(spec))
    assert all(part in line for part in [spec, *parts]), line


def test_a_field_that_holds_no_text_names_the_record(tfds_directory, hf_directory):
  for spec in (f'tfds:{tfds_directory}#split=test,field=n', f'hf:{hf_directory}/one#field=n'):
    line = error_line(lambda spec=spec: list(data.read_documents(spec)))
    assert 'record 1: "n" must be a text, not int' in line


def test_damaged_records_are_one_line(tfds_directory, hf_directory, tmp_path):
  shutil.copytree(tfds_directory, tmp_path / '1.0.0')
  shutil.copytree(hf_directory / 'one', tmp_path / 'one')
  for path in (*tmp_path.glob('1.0.0/*train*'), *tmp_path.glob('one/*.arrow')):
    content = path.read_bytes()
    path.write_bytes(content[:len(content) // 2])
  for spec, part in ((f'tfds:{tmp_path}/1.0.0#split=train', 'record 1 is missing; the files in'),
                     (f'hf:{tmp_path}/one', 'cannot be read (')):
    assert part in error_line(lambda spec=spec: list(data.read_documents(spec)))


def test_fingerprints_follow_the_text_and_not_the_place(tfds_directory, hf_directory, tmp_path):
  shutil.copytree(tfds_directory, tmp_path / '1.0.0')
  shutil.copytree(hf_directory / 'two', tmp_path / 'two')
  fingerprint = data.corpus_fingerprint
  assert fingerprint(f'tfds:{tfds_directory}#split=test') == fingerprint(
      f'tfds:{tmp_path}/1.0.0#split=test') == fingerprint(
      f'tfds:aogpt_texts#split=test,data_dir={tfds_directory.parents[1]}')
  assert fingerprint(f'hf:{hf_directory}/two#split=test') == fingerprint(
      f'hf:{tmp_path}/two#split=test')
  different = [f'tfds:{tfds_directory}#split={s}' for s in ('train', 'test', 'train[:3]')]
  different += [f'hf:{hf_directory}/two#split={s}' for s in ('train', 'test')]
  different += [f'hf:{hf_directory}/two#split=test,{o}' for o in ('field=n', 'detokenize=ptb')]
  assert len(set(map(fingerprint, different))) == len(different)
  path = next(tmp_path.glob('1.0.0/*test*'))
  before = fingerprint(f'tfds:{tmp_path}/1.0.0#split=test')
  path.write_bytes(path.read_bytes()[:-1] + b'!')
  assert fingerprint(f'tfds:{tmp_path}/1.0.0#split=test') != before


@pytest.mark.parametrize('spec', ['wikitext2', 'hf:own/texts#split=train', 'lm1b', 'ptb'])
def test_without_network_the_hub_is_one_line_at_once(monkeypatch, spec):
  import datasets
  monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', 'https://hub.invalid')
  start = time.monotonic()
  for function in (data.check_corpus, data.read_documents, data.corpus_fingerprint):
    line = error_line(lambda function=function: function(spec))
    assert spec in line and 'there is no network' in line and 'hf:DIRECTORY' in line
  assert time.monotonic() - start < 3 * 10  # the library's own retries take 23 s each
  assert not datasets.config.HF_HUB_OFFLINE


def test_without_network_the_cache_of_the_hub_is_read(monkeypatch, hf_directory, hf_cache, caplog):
  import datasets
  monkeypatch.setattr(online, 'reachable', lambda url: False)
  built = datasets.load_dataset(str(hf_directory / 'files'), split='train')
  made = hf_cache / 'files' / 'default' / '0.0.0'
  assert str(made) in built.cache_files[0]['filename']
  (hf_cache / 'own___texts' / 'default').mkdir(parents=True)
  for path in made.rglob('files-train.arrow'):
    path.rename(path.with_name('texts-train.arrow'))
  made.rename(hf_cache / 'own___texts' / 'default' / '0.0.0')
  assert list(data.read_documents('hf:own/texts')) == DOCUMENTS
  assert 'no network; reading the copy in the cache' in caplog.text
  assert data.corpus_fingerprint('hf:own/texts') == data.corpus_fingerprint(
      'hf:own/texts#split=train')


def test_with_network_a_check_downloads_nothing_and_reading_asks_the_hub(monkeypatch):
  import datasets
  asked = []

  def load_dataset(name, config, *, split, revision):
    asked.append((name, config, split, revision))
    return datasets.Dataset.from_dict({'sentence': [" it 's N ", 'x'], 'text': ['a', '']})

  monkeypatch.setattr(online, 'reachable', lambda url: True)
  monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
  for spec in ('ptb', 'wikitext2#split=test', 'hf:own/texts/small'):
    data.check_corpus(spec)
  assert asked == []
  assert list(data.read_documents('ptb')) == [" it's 1 ", 'x']
  assert list(data.read_documents('wikitext2')) == ['a', '']
  list(data.read_documents('wikitext103'))
  list(data.read_documents('wikitext2#split=test,revision=abc'))
  list(data.read_documents('hf:own/texts/small'))
  assert asked == [
      ('ptb-text-only/ptb_text_only', None, 'test', 'refs/convert/parquet'),
      ('Salesforce/wikitext', 'wikitext-2-raw-v1', 'train', None),
      ('Salesforce/wikitext', 'wikitext-103-raw-v1', 'test', None),
      ('Salesforce/wikitext', 'wikitext-2-raw-v1', 'test', 'abc'),
      ('own/texts', 'small', None, None)]


def test_a_tfds_download_says_what_it_needs(monkeypatch, tmp_path):
  spec = f'tfds:lm1b#split=test,data_dir={tmp_path}'
  find_spec = hubs.importlib.util.find_spec
  present = set()
  monkeypatch.setattr(hubs.importlib.util, 'find_spec', lambda name: (
      name in present or None) if name == 'tensorflow' else find_spec(name))
  monkeypatch.setattr(online, 'reachable', lambda url: False)
  line = error_line(lambda: data.check_corpus(spec))
  assert 'TensorFlow' in line and 'aogpt_jax[tfds]' in line and 'tfds:DIRECTORY' in line
  present.add('tensorflow')
  assert 'there is no network' in error_line(lambda: data.check_corpus(spec))


def test_without_the_datasets_package(monkeypatch):
  monkeypatch.setattr(online.importlib.util, 'find_spec', lambda name: None)
  line = error_line(lambda: data.check_corpus('lm1b'))
  assert line == 'corpus "lm1b": needs the package datasets; pip install \'aogpt_jax[hf]\''


def test_a_repository_with_a_script_names_the_way_out(monkeypatch):
  import datasets

  def load_dataset(*args, **kwargs):
    raise RuntimeError('Dataset scripts are no longer supported, but found\nopenwebtext.py')

  monkeypatch.setattr(online, 'reachable', lambda url: True)
  monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
  line = error_line(lambda: data.read_documents('openwebtext'))
  assert 'found openwebtext.py' in line and 'revision=refs/convert/parquet' in line
