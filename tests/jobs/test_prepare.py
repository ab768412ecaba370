"""--mode=prepare as a user runs it, and that train finds what it made."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.data import packing, tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import prepare

ROOT = pathlib.Path(__file__).parents[2]
TEXT = 'The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n'


@pytest.fixture
def corpus(tmp_path) -> str:
  path = tmp_path / 'texts.jsonl'
  path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in [TEXT * 20, '', TEXT * 20]))
  return f'files:{path}'


def make_config(corpus: str, **changes):
  values = {
      'model': dict(vocab_size=300, context_length=8, num_layers=1, num_heads=2, embed_dim=16,
                    position_encoding='target_rotary'),
      'data': dict(train=corpus, validation=corpus, vocab_size=290) | changes,
      'train': dict(num_steps=1, batch_size=16),
      'eval': dict(num_orders=2),
      'sample': dict(num_samples=1),
  }
  return config_lib.from_dict(values)


def rows(text: str) -> list[list[str]]:
  return [[cell.strip() for cell in line.strip('|').split('|')]
          for line in text.splitlines() if line.startswith('|')]


def test_the_table_and_the_second_run(corpus, tmp_path, capsys):
  config, workdir = make_config(corpus), tmp_path / 'run'
  prepare.run(config, workdir)
  output = capsys.readouterr().out
  names, _, train, validation = rows(output)
  row = dict(zip(names, train))
  (directory,) = (path for path in (workdir / 'data').iterdir() if path.is_dir())
  found = packing.load_prepared(directory)
  assert (row['corpus'], row['documents'], row['empty']) == (corpus, '3', '1')
  assert row['tokens'] == f'{found.num_tokens:,}' and row['blocks'] == f'{found.num_blocks:,}'
  assert row['bytes/token'] == f'{len(TEXT) * 40 / found.num_tokens:.3f}'
  assert found.corpus_fingerprint.startswith(row['fingerprint'])
  assert row['directory'] == str(directory)
  assert float(row['MB/s']) >= 0
  assert dict(zip(names, validation))['MB/s'] == 'was ready'  # the same corpus
  assert 'ready: nothing' not in output
  prepare.run(config, workdir)
  output = capsys.readouterr().out
  assert 'The data is ready: nothing was left to do.' in output
  assert dict(zip(*rows(output)[::2]))['MB/s'] == 'was ready'


class DataFoundError(Exception):
  pass


@pytest.mark.parametrize('elsewhere', [False, True])
def test_train_finds_it_ready(corpus, tmp_path, monkeypatch, elsewhere):
  """Up to the point where train makes its model, nothing is packed or trained again."""
  from aogpt_jax.jobs import train

  def stop(config):
    raise DataFoundError

  config = make_config(corpus, directory=str(tmp_path / 'shared') if elsewhere else '')
  prepare.run(config, tmp_path / 'run')
  assert (tmp_path / 'shared').exists() == elsewhere
  monkeypatch.setattr(packing, '_build', None)
  monkeypatch.setattr(tokenizers, 'train_sentencepiece', None)
  monkeypatch.setattr(train.step_lib, 'make_recipe', stop)
  with pytest.raises(DataFoundError):
    train.run(config, tmp_path / 'run')


def test_the_tokenizer_of_a_run_is_used(corpus, tmp_path):
  config = make_config(corpus)
  tokenizer = tokenizers.train_sentencepiece([TEXT[::-1] * 40], 290)
  tokenizer.save(tmp_path / 'run' / 'tokenizer.model')
  prepare.run(config, tmp_path / 'run')
  (directory,) = (path for path in (tmp_path / 'run' / 'data').iterdir() if path.is_dir())
  assert packing.load_prepared(directory).tokenizer_fingerprint == tokenizer.fingerprint


def test_the_number_of_workers_is_free(corpus, tmp_path):
  assert config_lib.differing_fields(make_config(corpus), make_config(corpus, workers=3)) == []
  with pytest.raises(UserError, match='data.workers=-1: must be at least 0'):
    make_config(corpus, workers=-1)


def test_the_workers_of_the_config_are_used(corpus, tmp_path, monkeypatch):
  used = []
  real = packing.workers_lib.encode_documents
  monkeypatch.setattr(packing.workers_lib, 'encode_documents',
                      lambda documents, tokenizer, workers, first: (
                          used.append(workers) or real(documents, tokenizer, workers, first)))
  monkeypatch.setattr(packing.workers_lib, 'count_cores', lambda: 7)
  prepare.run(make_config(corpus, workers=3), tmp_path / 'a')
  prepare.run(make_config(corpus), tmp_path / 'b')
  assert used == [3, 7]


def test_a_tokenizer_that_does_not_fit(corpus, tmp_path):
  tokenizer = tokenizers.train_sentencepiece([TEXT * 40], 289)
  tokenizer.save(tmp_path / 'run' / 'tokenizer.model')
  with pytest.raises(UserError, match=r'data.vocab_size=290: must be 289, as .*tokenizer.model'):
    prepare.run(make_config(corpus), tmp_path / 'run')
  with pytest.raises(UserError, match='model.vocab_size=300: must be at least the data.vocab_size'):
    prepare.run(make_config(corpus, vocab_size=301), tmp_path / 'run')


def run_main(*args: str) -> subprocess.CompletedProcess:
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  return subprocess.run([sys.executable, '-m', 'aogpt_jax.main', '--mode=prepare',
                         '--config=configs/quickstart.py', *args], cwd=ROOT, env=env,
                        capture_output=True, text=True, timeout=120)


def test_a_bad_record_is_one_line_of_the_command(corpus, tmp_path):
  path = tmp_path / 'texts.jsonl'
  path.write_text(path.read_text() + '{"text": 3}\n')
  tokenizers.train_sentencepiece([TEXT * 40], 289).save(tmp_path / 'x.model')
  result = run_main(f'--workdir={tmp_path}/run', f'--config.data.train={corpus}',
                    f'--config.data.tokenizer={tmp_path}/x.model')
  assert result.returncode == 2
  assert result.stderr.splitlines() == [
      f'error: {path}, line 4: must be a JSON object with the text in a string field "text"; '
      'it has text']


def test_another_modes_flag(tmp_path):
  result = run_main(f'--workdir={tmp_path}/run', '--overwrite')
  assert result.returncode == 2
  assert result.stderr == 'error: --overwrite is not used by --mode=prepare; leave it out\n'


def test_bench_prints_both_sides(corpus, tmp_path, monkeypatch, capsys):
  from aogpt_jax.bench import measure
  from aogpt_jax.jobs import bench
  monkeypatch.setattr(measure, 'REPEATS', 1)
  bench.run(make_config(corpus, workers=2, validation='files:none.txt'), tmp_path, 'prepare')
  names, _, plain, prepared = rows(capsys.readouterr().out)
  assert (plain[:2], prepared[:2]) == (['plain loop', '1'], ['prepare', '1'])  # too small for two
  seconds, ratios = ([float(row[names.index(name)].split()[0]) for row in (plain, prepared)]
                     for name in ('seconds', 'plain loop / this'))
  assert all(float(row[names.index('MB/s')]) > 0 for row in (plain, prepared))
  assert ratios[0] == 1 and ratios[1] == pytest.approx(seconds[0] / seconds[1], rel=0.02)
