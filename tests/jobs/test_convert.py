"""--mode=convert as a user runs it: a .pt file to a run, samples of it, and back to a .pt file."""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

import aogpt_jax
from aogpt_jax import config as config_lib, interop, lm as lm_lib
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import convert, train

ROOT = pathlib.Path(__file__).parents[2]
CHECKPOINT = ROOT / 'tests' / 'golden' / 'reference_checkpoint.pt'


def main(*args: str) -> subprocess.CompletedProcess:
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  return subprocess.run([sys.executable, '-m', 'aogpt_jax.main', *args], cwd=ROOT, env=env,
                        capture_output=True, text=True, timeout=300)


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> pathlib.Path:
  """The golden checkpoint as a run, made by the command line."""
  directory = tmp_path_factory.mktemp('convert') / 'run'
  result = main('--mode=convert', f'--source={CHECKPOINT}', f'--destination={directory}')
  assert result.returncode == 0, result.stderr
  return directory


def assert_same_weights(model, other):
  jax.tree.map(np.testing.assert_array_equal, interop.to_reference_arrays(model),
               interop.to_reference_arrays(other))


def test_a_run_has_both_weights_and_the_step_of_its_file(run):
  assert [p.name for p in run.parent.iterdir()] == ['run']  # nothing unfinished beside it
  assert sorted(p.name for p in run.iterdir()) == ['checkpoints', 'config.json']
  for ema in (False, True):
    lm = aogpt_jax.load(run, ema=ema)
    assert lm.step == 12 and lm.tokenizer.decode([3, 17]) == '3 17'
    assert_same_weights(lm.model, interop.load_reference(CHECKPOINT, ema=ema))


def test_the_command_line_samples_a_converted_run_and_writes_it_back(run, tmp_path):
  """--mode=sample as for any run; a template of text is left out with a line, one of ids filled."""
  sample = ('--mode=sample', '--config=configs/quickstart.py', f'--workdir={run}',
            '--config.sample.num_samples=1', '--config.sample.steps=4')
  result = main(*sample)
  assert result.returncode == 0, result.stderr
  assert 'sample.infill is left out: "Good" is not an id' in result.stderr
  ids = result.stdout.split('--- 1\n')[1].split('\n')[0].split()
  assert len(ids) == 16 and all(0 <= int(i) < 61 for i in ids)
  back = main('--mode=convert', f'--source={run}/checkpoints/00000012',
              f'--destination={tmp_path}/y.pt')
  assert back.returncode == 0, back.stderr
  old, new = (torch.load(p, weights_only=True) for p in (CHECKPOINT, tmp_path / 'y.pt'))
  assert list(new['model']) == list(old['model'])
  for key in ('iter_num', 'model_args', 'ema_rate'):
    assert new[key] == old[key]
  tensors = lambda file: [*file['model'].values(), *file['ema_model']['shadow_params']]
  assert all(map(torch.equal, tensors(new), tensors(old)))


def test_a_file_without_an_average_and_a_shorter_context(tmp_path, caplog):
  """The raw weights stand for the average, which a line says; --context_length crops."""
  checkpoint = torch.load(CHECKPOINT, weights_only=True)
  del checkpoint['ema_model']
  torch.save(checkpoint, tmp_path / 'x.pt')
  caplog.set_level('INFO', logger='aogpt_jax')
  convert.run(tmp_path / 'x.pt', tmp_path / 'run', context_length=9)
  assert 'has no averaged weights: the raw ones stand for them' in caplog.text
  lm = aogpt_jax.load(tmp_path / 'run')
  assert lm.config.model.context_length == 9
  assert_same_weights(lm.model, interop.load_reference(CHECKPOINT, ema=False, context_length=9))


def test_a_converted_run_cannot_be_trained_on(run):
  """Its data is not known. The directory is left as it was."""
  before = sorted(run.rglob('*'))
  config = config_lib.Config(model=lm_lib.read_config(run).model,
                             data=config_lib.DataConfig(vocab_size=61))
  with pytest.raises(UserError, match='a converted checkpoint, which cannot be trained on'):
    train.run(config, run)
  result = main('--config=configs/quickstart.py', f'--workdir={run}')
  assert result.returncode == 2 and 'Traceback' not in result.stderr
  assert 'holds a converted checkpoint' in result.stderr and 'overwrite' not in result.stderr
  assert [p for p in sorted(run.rglob('*')) if p.name != '.lock'] == before


def test_a_changed_vocabulary_is_not_the_tokenizer_of_the_run(run, tmp_path):
  """The manifest binds the tokenizer of ids to its vocabulary."""
  shutil.copytree(run, tmp_path / 'run')
  config = tmp_path / 'run' / 'config.json'
  config.write_text(config.read_text().replace('"vocab_size": 61', '"vocab_size": 62'))
  with pytest.raises(UserError, match='config.json: is not the tokenizer that this run was'):
    aogpt_jax.load(tmp_path / 'run')


@pytest.mark.parametrize(('args', 'message'), [
    (['--source=x.pt'], '--destination is missing; --mode=convert needs --source and'),
    (['--destination=run'], '--source is missing'),
    (['--source=x.pt', '--destination=run', '--workdir=run'], '--workdir is not used by'),
])
def test_flags_that_are_missing_or_of_another_mode(args, message):
  result = main('--mode=convert', *args)
  assert result.returncode == 2
  assert result.stderr.splitlines()[-1].startswith('error: ' + message)
  assert 'Traceback' not in result.stderr


def test_the_other_modes_need_config_and_workdir():
  for args, message in ((['--config=configs/quickstart.py'], '--workdir is missing'),
                        (['--mode=sample', '--workdir=x'], '--config is missing'),
                        (['--config=configs/quickstart.py', '--workdir=x', '--source=y'],
                         '--source is not used by --mode=train')):
    result = main(*args)
    assert result.returncode == 2 and f'error: {message}' in result.stderr, result.stderr
    assert 'Traceback' not in result.stderr


@pytest.mark.parametrize(('source', 'destination', 'message'), [
    ('x.pt', 'y.pt', 'one of the two must be a .pt file'),
    ('run', 'run2', 'one of the two must be a .pt file'),
    ('none.pt', 'new', 'none.pt: does not exist'), ('none', 'new.pt', 'none: does not exist'),
    ('empty', 'new.pt', 'not a run directory'), ('empty', 'dir.pt', 'is a directory'),
    ('x.pt', 'full', 'full: exists and is not an empty directory'),
    ('x.pt', 'file/new', 'file/new: cannot be written: Not a directory'),
    ('x.pt', 'file', 'file: exists and is not an empty directory'),
    ('bad.pt', 'new', 'bad.pt: cannot be read as a PyTorch checkpoint')])
def test_mistakes_change_nothing(tmp_path, source, destination, message):
  """Not even with --overwrite: no directory is deleted, nothing unfinished stays."""
  (tmp_path / 'x.pt').write_bytes(CHECKPOINT.read_bytes())
  (tmp_path / 'bad.pt').write_bytes(b'hello')
  (tmp_path / 'file').touch()
  for name in ('empty', 'full/sub', 'dir.pt'):
    (tmp_path / name).mkdir(parents=True)
  before = sorted(tmp_path.rglob('*'))
  with pytest.raises(UserError, match=message):
    convert.run(tmp_path / source, tmp_path / destination, overwrite=True)
  assert sorted(tmp_path.rglob('*')) == before


def test_only_a_file_is_overwritten_and_only_when_asked(run, tmp_path):
  path = tmp_path / 'y.pt'
  path.write_text('old')
  with pytest.raises(UserError, match='y.pt: exists; choose another name, or --overwrite it'):
    convert.run(run, path)
  assert path.read_text() == 'old'
  with pytest.raises(UserError, match='--context_length=8: only a .pt file can be cropped'):
    convert.run(run, path, context_length=8, overwrite=True)
  convert.run(run, path, overwrite=True)
  assert_same_weights(interop.load_reference(path), interop.load_reference(CHECKPOINT))


def test_a_run_that_the_reference_cannot_express(run, tmp_path, monkeypatch):
  """The field is named, and no file written."""
  lm = aogpt_jax.load(run)
  lm.model.config = dataclasses.replace(lm.model.config, qk_norm=False)
  monkeypatch.setattr(lm_lib, 'load', lambda *args, **kwargs: lm)
  with pytest.raises(UserError, match='model.qk_norm=False: must be True in a reference'):
    convert.run(run, tmp_path / 'y.pt')
  assert not list(tmp_path.iterdir())


def test_a_link_is_followed(tmp_path):
  """A link to an empty directory: the run is made there, the link stays."""
  (tmp_path / 'there').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'there')
  convert.run(CHECKPOINT, tmp_path / 'link')
  assert (tmp_path / 'link').is_symlink() and (tmp_path / 'there' / 'config.json').exists()


def test_an_empty_directory_may_be_the_destination(tmp_path):
  (tmp_path / 'run').mkdir()
  convert.run(CHECKPOINT, tmp_path / 'run')
  assert aogpt_jax.load(tmp_path / 'run').step == 12


def test_a_conversion_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
  def fail(reference, directory, fingerprint):
    directory.mkdir()
    raise UserError('disk full')
  monkeypatch.setattr(convert, '_write_checkpoint', fail)
  with pytest.raises(UserError, match='disk full'):
    convert.run(CHECKPOINT, tmp_path / 'run')
  assert not list(tmp_path.iterdir())
