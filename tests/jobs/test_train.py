"""Training as a user runs it: kill -9, SIGTERM, refusal, overwrite, non-finite loss."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from aogpt_jax import config as config_lib, data, lm as lm_lib
from aogpt_jax.data import tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import train as train_job
from aogpt_jax.training import checkpoints, metrics

TEXT = 'The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n'


@pytest.fixture(scope='module')
def corpus(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp('corpus') / 'text.txt'
  path.write_text(TEXT * 40)
  return f'files:{path}'


def make_config(corpus: str, **sections):
  """A config of a run of seconds; `sections` are dicts of changes by section."""
  values = {
      'model': dict(vocab_size=300, context_length=8, num_layers=1, num_heads=2, embed_dim=16,
                    condition_dim=8, position_encoding='target_rotary'),
      'data': dict(train=corpus, validation=corpus, vocab_size=290),
      'optimizer': dict(learning_rate=1e-2, warmup_steps=2, ema_decay=0.9),
      'train': dict(num_steps=20, batch_size=16, accumulation=2, log_every=1, eval_every=0,
                    checkpoint_every=3, keep_checkpoints=2),
      'eval': dict(num_orders=2, batch_size=64),
      'sample': dict(num_samples=1, infill='T<mask:2>x'),
  }
  for name, changes in sections.items():
    values[name] = values[name] | changes
  return config_lib.from_dict(values)


# Runs the job of a config in its own process; optionally kills it with SIGKILL while the checkpoint
# of one step is being written: before Orbax renames its directory, or before the manifest.
DRIVER = '''
import os, pathlib, signal, sys
from aogpt_jax import config as config_lib
from aogpt_jax.jobs import train
from aogpt_jax.training import checkpoints
config, workdir, where, step = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
if where == 'manifest':
  original = checkpoints._checksums
  checkpoints._checksums = lambda d: die() if d.name == f'{int(step):08d}' else original(d)
if where == 'arrays':
  save = checkpoints.ocp.save_checkpointables_async
  def killed(path, *args, **kwargs):
    response = save(path, *args, **kwargs)
    while path.name == f'{int(step):08d}':
      if any(p.is_file() for p in path.parent.glob(path.name + '.*/params/**/*')):
        die()
    return response
  checkpoints.ocp.save_checkpointables_async = killed
train.run(config_lib.from_json(pathlib.Path(config).read_text()), pathlib.Path(workdir))
'''


def run_process(config, workdir: pathlib.Path, where: str = '', step: int = 0):
  path = workdir.with_suffix('.json')
  path.write_text(config_lib.to_json(config))
  return subprocess.run([sys.executable, '-c', DRIVER, path, workdir, where, str(step)],
                        env=one_device(), capture_output=True, text=True, timeout=300)


def one_device() -> dict[str, str]:
  """The environment without the eight virtual devices that the tests' own process has."""
  return {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}


def read_arrays(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  """Every array of a checkpoint by its path, as saved."""
  import jax
  directory = checkpoints.step_directory(workdir / 'checkpoints', step)
  loaded = checkpoints.ocp.load_checkpointables(directory.resolve())
  return {jax.tree_util.keystr(path): np.asarray(leaf)
          for path, leaf in jax.tree_util.tree_leaves_with_path(loaded)}


def losses(workdir: pathlib.Path) -> list[tuple[int, float]]:
  records = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [(r['step'], r['train/nats_per_token']) for r in records if 'train/nats_per_token' in r]


@pytest.fixture(scope='module')
def straight(corpus, tmp_path_factory) -> pathlib.Path:
  """20 steps without a break."""
  workdir = tmp_path_factory.mktemp('runs') / 'straight'
  done = run_process(make_config(corpus), workdir)
  assert done.returncode == 0, done.stderr
  return workdir


@pytest.mark.parametrize('where', ['arrays', pytest.param('manifest', marks=pytest.mark.slow)])
def test_resume_after_kill_is_bitwise(corpus, straight, tmp_path, where):
  """Killed while saving step 12, the run goes on from 9: same losses, same bytes at step 20."""
  config, workdir = make_config(corpus), tmp_path / 'killed'
  killed = run_process(config, workdir, where, 12)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert checkpoints.finished_steps(workdir / 'checkpoints')[-1] == 9
  left = [p.name for p in (workdir / 'checkpoints').glob('00000012*')]  # the kill hit the save
  assert left == ['00000012' if where == 'manifest' else '00000012.orbax-checkpoint-tmp']
  resumed = run_process(config, workdir)
  assert resumed.returncode == 0, resumed.stderr
  assert losses(workdir) == losses(straight)
  assert [step for step, _ in losses(workdir)] == list(range(1, 21))
  want, got = read_arrays(straight, 20), read_arrays(workdir, 20)
  assert want.keys() == got.keys()
  for name, array in want.items():
    assert array.tobytes() == got[name].tobytes(), name
  assert any('mu' in name for name in want)  # the optimiser's moments are among them


def test_the_run_directory_is_complete(straight):
  """What the end of a run leaves: results, two checkpoints, event files, config, tokenizer."""
  assert checkpoints.finished_steps(straight / 'checkpoints') == [18, 20]
  result = json.loads((straight / 'evaluation.json').read_text())
  assert result['step'] == 20
  orders = {e['order']: e for e in result['estimates']}
  assert orders['uniform']['num_draws'] == 2
  assert orders['left_to_right']['nats_per_token'] < result['unigram_nats_per_token'] + 1
  assert '| left_to_right |' in (straight / 'evaluation.md').read_text()
  assert list((straight / 'tensorboard').glob('events.out.tfevents.*'))
  assert config_lib.from_json((straight / 'config.json').read_text()).train.num_steps == 20
  assert checkpoints.read_manifest(straight / 'checkpoints', 20)['batches_consumed'] == 20


def test_running_a_finished_run_again_says_so(corpus, straight, capsys):
  before = sorted(p.stat().st_mtime_ns for p in straight.rglob('checkpoints/**/*'))
  train_job.run(make_config(corpus), straight)
  assert 'This run is done: step 20 of 20.' in capsys.readouterr().out
  assert before == sorted(p.stat().st_mtime_ns for p in straight.rglob('checkpoints/**/*'))


def test_another_config_is_refused(corpus, straight):
  """The differing field is named with both values, and nothing is written over."""
  with pytest.raises(UserError, match=r'optimizer\.learning_rate: 0\.01 -> 0\.02'):
    train_job.run(make_config(corpus, optimizer=dict(learning_rate=0.02)), straight)
  # num_steps may grow, but here it also moves the end of the cosine.
  with pytest.raises(UserError, match=r'train\.num_steps: 20 -> 30, .*decay_steps=20 to keep it'):
    train_job.run(make_config(corpus, train=dict(num_steps=30)), straight)
  assert checkpoints.finished_steps(straight / 'checkpoints') == [18, 20]


@pytest.mark.slow
def test_overwrite_restarts(corpus, tmp_path):
  """--overwrite deletes the run and keeps what is not the run's."""
  short = dict(num_steps=2, checkpoint_every=0)
  train_job.run(make_config(corpus, train=short), tmp_path)
  (tmp_path / 'notes.txt').write_text('mine')
  longer = make_config(corpus, train=dict(num_steps=3, checkpoint_every=0))
  train_job.run(longer, tmp_path, overwrite=True)
  assert checkpoints.finished_steps(tmp_path / 'checkpoints') == [3]
  assert [step for step, _ in losses(tmp_path)] == [1, 2, 3]
  assert (tmp_path / 'notes.txt').read_text() == 'mine'


@pytest.mark.slow
def test_overwrite_deletes_runs_only(corpus, tmp_path):
  """Files with the names of a run's, in a directory that is none, are somebody else's."""
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'mine.txt').write_text('mine')
  (tmp_path / 'config.json').write_text('{"name": "another program"}')
  with pytest.raises(UserError, match='cannot be read as the config of a run'):
    train_job.run(make_config(corpus), tmp_path, overwrite=True)
  (tmp_path / 'config.json').unlink()
  for _ in range(2):  # the second time, the directory is a run
    train_job.run(make_config(corpus, train=dict(num_steps=1)), tmp_path, overwrite=True)
    assert (tmp_path / 'data' / 'mine.txt').read_text() == 'mine'


def test_a_tokenizer_without_a_run_is_not_taken(corpus, straight, tmp_path):
  """It may be of another vocabulary than this config's: neither used nor written over."""
  content = (straight / 'tokenizer.model').read_bytes()
  (tmp_path / 'tokenizer.model').write_bytes(content)
  for overwrite in (False, True):
    with pytest.raises(UserError, match='holds tokenizer.model but no config.json'):
      train_job.run(make_config(corpus), tmp_path, overwrite=overwrite)
  assert (tmp_path / 'tokenizer.model').read_bytes() == content


@pytest.mark.slow
def test_a_start_killed_while_packing_starts_anew(corpus, tmp_path, monkeypatch):
  """What it leaves does not bind the next start, which has another vocabulary."""
  def killed(*args):
    raise KeyboardInterrupt
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(train_job.data, 'prepare', killed, raising=False)
    train_job.run(make_config(corpus), tmp_path)
  train_job.run(make_config(corpus, data=dict(vocab_size=289), train=dict(num_steps=1)), tmp_path)
  assert tokenizers.load_tokenizer(tmp_path / 'tokenizer.model').vocab_size == 289


def test_a_start_that_fails_does_not_bind_the_directory(corpus, tmp_path):
  """More rows than blocks is only known once the data is packed; the corrected command works."""
  with pytest.raises(UserError, match='fewer than global_batch = 8192'):
    train_job.run(make_config(corpus, train=dict(batch_size=8192)), tmp_path)
  train_job.run(make_config(corpus, train=dict(num_steps=1)), tmp_path)


def test_two_runs_in_one_directory(corpus, tmp_path):
  """The second is refused at once and touches nothing; afterwards the directory is free."""
  with train_job._only_run(tmp_path), pytest.raises(UserError, match='another process is training'):
    train_job.run(make_config(corpus), tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['.lock']
  train_job.run(make_config(corpus, train=dict(num_steps=1)), tmp_path)


def test_a_lost_tokenizer_is_not_replaced_by_another(tmp_path):
  """On a changed corpus a new one would be trained: refused before it is written."""
  text = tmp_path / 'text.txt'
  text.write_text(TEXT * 40)
  config, workdir = make_config(f'files:{text}', train=dict(num_steps=1)), tmp_path / 'run'
  train_job.run(config, workdir)
  (workdir / 'tokenizer.model').unlink()
  text.write_text(TEXT[::-1] * 40)
  with pytest.raises(UserError, match='was trained on corpus_fingerprint='):
    train_job.run(config, workdir)
  text.write_text(TEXT * 40)
  train_job.run(config, workdir)  # the advice of the message works


@pytest.mark.slow
def test_sampling_refuses_another_tokenizer(corpus, tmp_path):
  train_job.run(make_config(corpus, train=dict(num_steps=1)), tmp_path)
  other = tokenizers.train_sentencepiece([TEXT[::-1] * 40], 290)
  other.save(tmp_path / 'tokenizer.model')
  with pytest.raises(UserError, match='is not the tokenizer that this run was trained with'):
    lm_lib.load(tmp_path)


def test_evaluation_json_is_json(straight):
  refuse = lambda name: pytest.fail(f'{name} is no JSON')
  result = json.loads((straight / 'evaluation.json').read_text(), parse_constant=refuse)
  assert result['estimates'][0]['error_over_orders'] is None
  assert result['estimates'][1]['perplexity'] > 1


def test_wandb_that_is_not_installed(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(train_job.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'wandb_project=.*pip install'):
    train_job.run(make_config(corpus, train=dict(wandb_project='x')), tmp_path)


@pytest.mark.parametrize('line', ['null', '[1]', '{"a": 1}', '{"step": 1, "x"', '\x00'])
def test_strange_lines_of_metrics_are_dropped(tmp_path, line):
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(f'{{"step": 1}}\n{line}\n'.encode() + b'\xff\xfe\n{"step": 3}\n')
  metrics._truncate_after(path, 2)
  assert path.read_text() == '{"step": 1}\n'


def test_only_unfinished_saves_are_removed(tmp_path):
  for name in ('00000003', '00000004.orbax-checkpoint-tmp', 'best', 'damaged-00000002'):
    (tmp_path / name).mkdir()
  checkpoints._remove_unfinished(tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['best', 'damaged-00000002']


@pytest.mark.parametrize('signum', [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_exits_with_0(corpus, tmp_path, signum):
  """The signal arrives in mid-run; the step it was at is saved, and the run goes on from there."""
  config = make_config(corpus, train=dict(num_steps=100_000, checkpoint_every=0))
  path, workdir = tmp_path / 'run.json', tmp_path / 'run'
  path.write_text(config_lib.to_json(config))
  process = subprocess.Popen([sys.executable, '-c', DRIVER, path, workdir, '', '0'],
                             env=one_device(), text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
  try:
    metrics_file = workdir / 'metrics.jsonl'
    for _ in range(1200):
      if metrics_file.exists() and len(metrics_file.read_text().splitlines()) >= 3:
        break
      try:
        process.wait(0.1)
        break
      except subprocess.TimeoutExpired:
        continue
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 0, output
  steps = checkpoints.finished_steps(workdir / 'checkpoints')
  assert len(steps) == 1 and 3 <= steps[0] < 100_000
  assert losses(workdir)[-1][0] == steps[0]


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path):
  """A learning rate that blows up: one clear line; the last checkpoint holds finite weights."""
  config = make_config(corpus, optimizer=dict(learning_rate=1e30, clip_norm=0.0, warmup_steps=5),
                       train=dict(checkpoint_every=1))
  with pytest.raises(UserError, match='must be finite; the last good checkpoint is kept') as error:
    train_job.run(config, tmp_path)
  assert '\n' not in str(error.value)
  steps = checkpoints.finished_steps(tmp_path / 'checkpoints')
  assert steps and f'step {steps[-1]}' in str(error.value)
  saved = read_arrays(tmp_path, steps[-1])
  assert all(np.isfinite(a).all() for name, a in saved.items() if 'params' in name)
  report = json.loads((tmp_path / 'nonfinite.json').read_text())  # is named in the message
  assert f'step {report["step"]}:' in str(error.value) and 'nonfinite.json' in str(error.value)
  tokenizer = tokenizers.load_tokenizer(tmp_path / 'tokenizer.model')
  blocks = data.open_blocks(train_job.prepare.blocks(config, tmp_path, tokenizer)[0])
  batches = data.train_batches(blocks, 16, 0, start=report['step'] - 1)
  assert np.array_equal([blocks[i] for i in report['block_indices']], next(batches))
  batches.close()


@pytest.mark.slow
def test_changed_corpus_is_refused(tmp_path):
  """Continuing on another text of the same name would change the order of batches."""
  text = tmp_path / 'text.txt'
  text.write_text(TEXT * 40)
  config = make_config(f'files:{text}', train=dict(num_steps=2))
  train_job.run(config, tmp_path / 'run')
  text.write_text(TEXT * 41)
  with pytest.raises(UserError, match='was trained on corpus_fingerprint='):
    train_job.run(config, tmp_path / 'run')


def test_a_directory_that_cannot_be_written(corpus):
  with pytest.raises(UserError, match='--workdir=/proc/run: cannot be written'):
    train_job.run(make_config(corpus), pathlib.Path('/proc/run'))


def test_vocabulary_smaller_than_the_tokenizers(corpus, straight, tmp_path):
  """A loaded tokenizer of 290 ids does not fit a model of 280."""
  config = make_config(corpus, model=dict(vocab_size=280),
                       data=dict(tokenizer=str(straight / 'tokenizer.model')))
  with pytest.raises(UserError, match='model.vocab_size=280: must be at least the 290 ids'):
    train_job.run(config, tmp_path)
  assert not (tmp_path / 'tokenizer.model').exists()


@pytest.fixture(scope='module')
def short_run(corpus, tmp_path_factory):
  """Two steps, both saved: its config and directory."""
  config = make_config(corpus, train=dict(num_steps=2, checkpoint_every=1))
  workdir = tmp_path_factory.mktemp('short')
  train_job.run(config, workdir)
  return config, workdir


@pytest.mark.parametrize('damage', ['flip', 'truncate', 'delete', 'manifest'])
def test_damaged_checkpoint_is_not_used(short_run, tmp_path, damage):
  """One flipped byte, a short file, a missing file: named, with the way back."""
  config, original = short_run
  shutil.copytree(original, tmp_path, dirs_exist_ok=True)
  directory = checkpoints.step_directory(tmp_path / 'checkpoints', 2)
  victim = max((p for p in (directory / 'params').rglob('*') if p.is_file()),
               key=lambda p: p.stat().st_size)
  content = bytearray(victim.read_bytes())
  if damage == 'flip':
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
  elif damage == 'truncate':
    victim.write_bytes(content[:-1])
  elif damage == 'manifest':
    victim = directory / 'manifest.json'
    victim.unlink()
  else:
    victim.unlink()
  with pytest.raises(UserError, match=f'{victim.name}.*damaged; --allow_older_checkpoint continues '
                     'from step 1'):
    train_job.run(config, tmp_path)
  assert directory.exists()
  if damage != 'flip':  # the others go back in the same way; --mode=drill runs them all
    return
  train_job.run(config, tmp_path, allow_older_checkpoint=True)
  assert (tmp_path / 'checkpoints' / 'damaged-00000002' / 'params').is_dir()
  assert checkpoints.read_manifest(tmp_path / 'checkpoints', 2)['step'] == 2
  assert [step for step, _ in losses(tmp_path)] == [1, 2]
