"""What may happen to a run: stops, full disks, other meshes, damaged data; and the whole drill."""

import errno
import json
import os
import pathlib
import shutil
import signal

import jax
import pytest
from test_train import TEXT, losses, make_config

from aogpt_jax import sharding as sharding_lib
from aogpt_jax.data import packing
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import drill, train as train_job
from aogpt_jax.training import checkpoints, event_files, loop, metrics


@pytest.fixture(scope='module')
def corpus(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp('corpus') / 'text.txt'
  path.write_text(TEXT * 10)
  return f'files:{path}'


@pytest.fixture(scope='module')
def data_directory(tmp_path_factory) -> str:
  """Tokenizer and blocks are made once for all runs of this file."""
  return str(tmp_path_factory.mktemp('data'))


@pytest.fixture(autouse=True)
def use_mesh(monkeypatch):
  """Lays runs out on the first devices, one to begin with; a compilation for eight takes longer."""
  make_mesh = sharding_lib.make_mesh

  def use(*sizes):
    config = sharding_lib.MeshConfig(*sizes)
    devices = jax.devices()[:config.data * config.fsdp * config.tensor]
    monkeypatch.setattr(sharding_lib, 'make_mesh', lambda _: make_mesh(config, devices))
  use(1, 1, 1)
  return use


@pytest.fixture(autouse=True)
def no_last_evaluation(monkeypatch):
  """Its compilation would be most of the time of these tests."""
  monkeypatch.setattr(train_job, '_finish', lambda *args: None)
  monkeypatch.setattr(train_job, '_show', lambda *args: None)


@pytest.fixture
def config_of(corpus, data_directory):
  def make(**train):
    return make_config(corpus, data=dict(directory=data_directory), sample=dict(
        num_samples=0, infill=''), optimizer=dict(decay_steps=9), train=train)
  return make


def steps(workdir: pathlib.Path) -> list[int]:
  return checkpoints.finished_steps(workdir / 'checkpoints')


@pytest.mark.slow
def test_other_meshes_continue_the_exact_run(config_of, tmp_path, use_mesh):
  """(2, 2, 2), then one device, then (4, 2, 1): the losses of a run on one device in one go."""
  for end, sizes in ((3, (2, 2, 2)), (6, (1, 1, 1)), (9, (4, 2, 1))):
    use_mesh(*sizes)
    train_job.run(config_of(num_steps=end), tmp_path / 'moved')
  use_mesh(1, 1, 1)
  train_job.run(config_of(num_steps=9), tmp_path / 'whole')
  want, got = losses(tmp_path / 'whole'), losses(tmp_path / 'moved')
  assert [step for step, _ in got] == list(range(1, 10))
  assert dict(got) == pytest.approx(dict(want), abs=1e-5)
  assert len({round(loss, 3) for loss in dict(want).values()}) == 9  # the weights moved


def test_sigterm_ends_an_evaluation(config_of, tmp_path, monkeypatch):
  """In the first batch of the validation at step 2: no second batch, step 2 is saved, no error."""
  calls, make = [], train_job.evaluation.make_block_nll

  def patched(*args):
    block_nll = make(*args)

    def call(*batch):
      calls.append(1)
      os.kill(os.getpid(), signal.SIGTERM)
      return block_nll(*batch)
    return call
  monkeypatch.setattr(train_job.evaluation, 'make_block_nll', patched)
  train_job.run(config_of(num_steps=4, eval_every=2), tmp_path)
  assert len(calls) == 1 and steps(tmp_path) == [2]


def test_a_stop_in_the_last_evaluation_is_no_error(config_of, tmp_path, monkeypatch, caplog):
  """Everything is saved by then."""
  def stopped(*args):
    raise loop.Stopped
  monkeypatch.setattr(train_job, '_finish', stopped)
  with caplog.at_level('INFO'):
    train_job.run(config_of(num_steps=1), tmp_path)
  assert steps(tmp_path) == [1] and 'the same command evaluates again' in caplog.text


def test_a_save_that_fails_stops_the_run(config_of, tmp_path, monkeypatch):
  """At the next step, not at the next save; the checkpoint before it stays."""
  original = checkpoints._checksums

  def full(directory):
    if directory.name == '00000006':
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return original(directory)
  monkeypatch.setattr(checkpoints, '_checksums', full)
  with pytest.raises(UserError, match=r'saving a checkpoint failed: .*No space left.*: \[3\]$'):
    train_job.run(config_of(num_steps=2000), tmp_path)
  assert steps(tmp_path) == [3] and losses(tmp_path)[-1][0] < 2000
  assert not list((tmp_path / 'checkpoints').glob('00000006*'))  # its bytes are given back


def test_a_disk_without_room_is_known_before_the_save(config_of, tmp_path, monkeypatch):
  usage = shutil.disk_usage('/')._replace(free=1000)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(UserError, match='No space left on device: it has .* and 1,000 are free'):
    train_job.run(config_of(num_steps=3), tmp_path)
  assert steps(tmp_path) == []


def test_metrics_that_cannot_be_written_stop_the_run(config_of, tmp_path, monkeypatch):
  """The run is saved first; the line names the file."""
  class Full:
    name = 'metrics.jsonl'

    def write(self, text):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
      self.write('')
  init = metrics.MetricWriter.__init__

  def patched(self, *args):
    init(self, *args)
    self._file.close()
    self._file = Full()
  monkeypatch.setattr(metrics.MetricWriter, '__init__', patched)
  with pytest.raises(UserError, match='^metrics.jsonl: cannot be written: No space left'):
    train_job.run(config_of(num_steps=9, checkpoint_every=0), tmp_path)
  assert steps(tmp_path) == [1]


def test_a_full_disk_does_not_stop_the_event_files(tmp_path, caplog):
  """tensorboardX's thread would die, and its queue of ten would then hold up training for ever."""
  board = event_files.open_board(tmp_path, 0)
  (path,) = tmp_path.glob('events.out.tfevents.*')
  event_file = board.file_writer.event_writer._ev_writer._py_recordio_writer._writer
  event_file._file.close()
  event_file._file = open('/dev/full', 'wb')
  for step in range(100):
    board.add_scalar('x', 1.0, step)
  board.close()
  assert [r for r in caplog.records if 'No space left' in r.getMessage()
          and str(path) in r.getMessage()]


def test_damaged_data_is_one_line(config_of, tmp_path):
  """A byte in the middle of the blocks: the folder is named, with the way out."""
  config = config_of(num_steps=1)
  train_job.run(config, tmp_path / 'fine')
  copy = tmp_path / 'data'
  shutil.copytree(config.data.directory, copy)
  for file in copy.rglob('*.array_record-*'):
    drill._flip_byte(file, 4000)
  prepared = [packing.load_prepared(p.parent) for p in copy.glob('*/prepared.json')]
  blocks = packing.open_blocks(prepared[0])
  with pytest.raises(UserError, match=f'{prepared[0].directory}: one of the blocks 0 to .* is '
                     'damaged .*hash mismatch.*prepare the data again') as error:
    blocks.__getitems__(list(range(len(blocks))))
  assert '\n' not in str(error.value)


def test_all_checkpoints_damaged(config_of, tmp_path):
  """Nothing is passed over in silence, and nothing is started anew."""
  config = config_of(num_steps=2, checkpoint_every=1)
  train_job.run(config, tmp_path)
  for step in (1, 2):
    drill.flip_byte(checkpoints.step_directory(tmp_path / 'checkpoints', step))
  with pytest.raises(UserError, match='00000002.*--allow_older_checkpoint continues from step 1'):
    train_job.run(config, tmp_path)
  with pytest.raises(UserError, match='00000001.*no older one .*--overwrite starts anew'):
    train_job.run(config, tmp_path, allow_older_checkpoint=True)
  assert json.loads((tmp_path / 'checkpoints/00000001/manifest.json').read_text())['step'] == 1


@pytest.mark.slow
def test_the_whole_drill(tmp_path, capsys):
  """Ten faults, each in processes of their own; about 5 minutes."""
  drill.run(tmp_path)
  table = capsys.readouterr().out
  assert table.count('| yes |') == len(drill.CASES) == 10 and '| NO |' not in table
