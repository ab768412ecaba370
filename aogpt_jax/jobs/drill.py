"""--mode=drill: breaks small runs in every way that we know, and prints what became of them.

Each case is a run of seconds in processes of its own, hit by one fault (see `faults`), and started
again with the same command. It passes if it behaved as expected, lost no more than one checkpoint
interval, and ended with the losses of a run that nothing happened to.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from aogpt_jax.errors import UserError
from aogpt_jax.jobs import faults
from aogpt_jax.training import checkpoints

NUM_STEPS, INTERVAL = 12, 3
TOLERANCE = 1e-5  # nats; on one machine the losses are equal to the last bit
CONFIG = f'''"""The run of --mode=drill."""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.default()
  config.model.update(vocab_size=300, context_length=8, num_layers=1, num_heads=2, embed_dim=16,
                      condition_dim=8, position_encoding='target_rotary')
  config.data.update(train='files:TEXT', validation='files:TEXT', directory='DATA', vocab_size=290)
  config.optimizer.update(learning_rate=1e-2, warmup_steps=2, ema_decay=0.9)
  config.train.update(num_steps={NUM_STEPS}, batch_size=16, log_every=1, eval_every=5,
                      checkpoint_every={INTERVAL}, keep_checkpoints=2)
  config.eval.update(num_orders=2, batch_size=64)
  config.sample.num_samples = 0
  return config
'''
TEXT = 'The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n'


class Case(NamedTuple):
  """break_it(drill, run directory) breaks a run and starts it again; it returns what was seen."""

  name: str
  expected: str
  break_it: Callable[['Drill', pathlib.Path], str]


class Failed(Exception):  # noqa: N818, a result
  """Something else happened than was expected."""


class Drill(NamedTuple):
  """The directory of all runs, and the losses of the one that nothing happened to."""

  root: pathlib.Path
  losses: dict[int, float]

  def train(self, run: pathlib.Path, fault: str = 'none', *flags: str, code: int = 0) -> str:
    """Runs the training of CONFIG in a process; returns what it wrote to stderr.

    Raises:
      Failed: unless it ends with exit code `code`; for 2, with one line of error.
    """
    # One device, and quick compilation; nothing else differs from how a user runs it.
    env = os.environ | {'XLA_FLAGS': '--xla_backend_optimization_level=0', 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(
        [sys.executable, '-m', 'aogpt_jax.jobs.faults', fault, f'--config={self.root}/config.py',
         f'--workdir={run}', *flags], env=env, capture_output=True, text=True)
    if done.returncode != code:
      raise Failed(f'exit {done.returncode}, not {code}: {_last_line(done.stderr)}')
    lines = sum(line.startswith('error: ') for line in done.stderr.splitlines())
    noise = 'Traceback' in done.stderr and fault != 'limit_files'  # tensorstore's threads print
    if code == 2 and (noise or lines != 1):
      raise Failed(f'not one line of error: {_last_line(done.stderr)}')
    return done.stderr

  def resume(self, run: pathlib.Path, *flags: str, sound: int | None = None) -> str:
    """Starts a run again, to its end; returns from where it continued.

    Args:
      run: its directory.
      *flags: further ones.
      sound: step of the newest checkpoint that is not damaged; None: the newest.

    Raises:
      Failed: if more than an interval was lost, or the losses are not those of the whole run.
    """
    reached = max(_losses(run), default=0)
    steps = checkpoints.finished_steps(run / 'checkpoints')
    sound = (steps or [0])[-1] if sound is None else sound
    says = self.train(run, 'none', *flags)
    if sound and f'continuing at step {sound}' not in says:
      raise Failed(f'did not continue at step {sound}')
    if reached - sound > INTERVAL:
      raise Failed(f'lost {reached - sound} steps')
    losses = _losses(run)
    if losses.keys() != self.losses.keys() or any(
        abs(losses[s] - self.losses[s]) > TOLERANCE for s in losses):
      raise Failed('the losses are not those of the run that nothing happened to')
    return f'at step {reached}; goes on from {sound}, same losses'


def _last_line(text: str) -> str:
  lines = text.strip().splitlines()
  return next((line for line in reversed(lines) if line.startswith('error: ')),
              lines[-1] if lines else '')


def _losses(run: pathlib.Path) -> dict[int, float]:
  path = run / 'metrics.jsonl'
  records = []
  for line in path.read_text().splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):  # cut short by a kill or a full disk
      records.append(json.loads(line))
  return {r['step']: r['train/nats_per_token'] for r in records if 'train/nats_per_token' in r}


def _says(says: str, *parts: str) -> None:
  line = _last_line(says)
  for part in parts:
    if part not in line:
      raise Failed(f'the line does not name {part}: {line}')


def _signal(fault: str, code: int) -> Callable[[Drill, pathlib.Path], str]:
  def break_it(drill: Drill, run: pathlib.Path) -> str:
    drill.train(run, fault, code=code)
    return f'exit {code} {drill.resume(run)}'
  return break_it


def _damage(change: Callable[[pathlib.Path], pathlib.Path],
            ) -> Callable[[Drill, pathlib.Path], str]:
  """Stops a run, damages its newest checkpoint, and starts it without and with the flag."""
  def break_it(drill: Drill, run: pathlib.Path) -> str:
    drill.train(run, 'stop')
    *_, older, newest = checkpoints.finished_steps(run / 'checkpoints')
    victim = change(checkpoints.step_directory(run / 'checkpoints', newest))
    _says(drill.train(run, code=2), victim.name, '--allow_older_checkpoint')
    return ('exit 2, names the file and the flag; with it, '
            + drill.resume(run, '--allow_older_checkpoint', sound=older))
  return break_it


def _largest(step: pathlib.Path) -> pathlib.Path:
  return max((p for p in (step / 'params').rglob('*') if p.is_file()),
             key=lambda p: p.stat().st_size)


def truncate(step: pathlib.Path) -> pathlib.Path:
  path = _largest(step)
  os.truncate(path, path.stat().st_size - 1)
  return path


def _flip_byte(path: pathlib.Path, at: int) -> None:
  content = bytearray(path.read_bytes())
  content[at] ^= 1
  path.write_bytes(content)


def flip_byte(step: pathlib.Path) -> pathlib.Path:
  path = _largest(step)
  _flip_byte(path, path.stat().st_size // 2)
  return path


def delete_metadata(step: pathlib.Path) -> pathlib.Path:
  path = next((step / 'params').rglob('_METADATA'))
  path.unlink()
  return path


def delete_manifest(step: pathlib.Path) -> pathlib.Path:
  path = step / checkpoints.MANIFEST
  path.unlink()
  return path


@contextlib.contextmanager
def _small_disk(directory: pathlib.Path) -> Iterator[bool]:
  """Mounts a disk of 16 MB; gives whether that was allowed."""
  directory.mkdir()
  mount = ['mount', '-t', 'tmpfs', '-o', 'size=16m', 'tmpfs', str(directory)]
  mounted = bool(shutil.which('mount')) and not subprocess.run(
      mount, capture_output=True).returncode
  try:
    yield mounted
  finally:
    if mounted:
      subprocess.run(['umount', '-l', str(directory)], check=True)


def fill_disk(drill: Drill, run: pathlib.Path) -> str:
  with _small_disk(run) as mounted:
    says = drill.train(run, 'fill_disk' if mounted else 'limit_files', code=2)
    kept = checkpoints.finished_steps(run / 'checkpoints')
    if kept != [faults.SAVE_STEP - INTERVAL]:
      raise Failed(f'checkpoints afterwards: {kept}')
    _says(says, 'No space left' if mounted else 'File too large')
    (run / faults.FILLER).unlink(missing_ok=True)
    how = 'tmpfs' if mounted else 'a limit on file sizes'
    return f'exit 2, names the cause ({how}), {drill.resume(run)}'


def nan(drill: Drill, run: pathlib.Path) -> str:
  says = drill.train(run, 'nan', code=2)
  _says(says, f'step {faults.NAN_STEP}', 'nonfinite.json')
  report = json.loads((run / 'nonfinite.json').read_text())
  if report['step'] != faults.NAN_STEP or len(set(report['block_indices'])) != 16:
    raise Failed(f'nonfinite.json: {report}')
  return f'exit 2, names step {faults.NAN_STEP} and nonfinite.json with 16 blocks, ' + (
      drill.resume(run))


def corrupt_data(drill: Drill, run: pathlib.Path) -> str:
  """The data of this run is a copy; its config says where."""
  data = run / 'data'
  shutil.copytree(drill.root / 'data', data)
  flag = f'--config.data.directory={data}'
  file = next(data.rglob('*.array_record-*'))
  _flip_byte(file, 40000)
  says = drill.train(run, 'none', flag, code=2)
  folder = file.parents[2]
  _says(says, str(folder), 'damaged', 'prepare the data again')
  shutil.rmtree(folder)
  return f'exit 2, names the folder; prepared again, {drill.resume(run, flag)}'


CASES = (
    Case('kill -9 during a save', 'ignored; the one before it is used',
         _signal('kill_in_save', -9)),
    Case('a truncated file in the newest checkpoint', 'refused; the older with the flag',
         _damage(truncate)),
    Case('one flipped byte in an array file', 'refused; the older with the flag',
         _damage(flip_byte)),
    Case('deleted Orbax metadata', 'refused; the older with the flag', _damage(delete_metadata)),
    Case('deleted manifest', 'refused; the older with the flag', _damage(delete_manifest)),
    Case('full disk during a save', 'stops; the last checkpoint is intact', fill_disk),
    Case(f'NaN weights at step {faults.NAN_STEP}', 'stops; names step and batch', nan),
    Case('a flipped byte in an ArrayRecord', 'stops; names the folder', corrupt_data),
    Case('SIGTERM while compiling', 'saves; exit 0', _signal('stop_in_compile', 0)),
    Case('SIGTERM while evaluating', 'saves; exit 0', _signal('stop_in_evaluation', 0)))


def prepare(root: pathlib.Path) -> Drill:
  """Writes config and corpus, and trains the run that nothing happens to."""
  root.mkdir(parents=True)
  text = root / 'text.txt'
  text.write_text(TEXT * 40)
  (root / 'config.py').write_text(
      CONFIG.replace('TEXT', str(text)).replace('DATA', str(root / 'data')))
  drill = Drill(root, {})
  drill.train(root / 'whole')
  return drill._replace(losses=_losses(root / 'whole'))


def run_case(drill: Drill, number: int) -> tuple[str, bool]:
  """Returns what was seen, in words, and whether that is what should be."""
  run = drill.root / f'case{number}'
  try:
    return CASES[number].break_it(drill, run), True
  except Failed as failure:
    return ' '.join(str(failure).split()).replace('|', '/'), False


def run(workdir: pathlib.Path) -> None:
  """Runs all cases in WORKDIR/drill and prints a Markdown table, a row as soon as it is known.

  Raises:
    UserError: if WORKDIR/drill exists, or a case did not go as it should.
  """
  root = workdir / 'drill'
  if root.exists():
    raise UserError(f'{root}: exists, from an earlier drill; delete it')
  drill = prepare(root)
  print('| fault | expected | seen | passed |\n|---|---|---|---|', flush=True)
  failed = []
  for number, case in enumerate(CASES):
    seen, passed = run_case(drill, number)
    print(f'| {case.name} | {case.expected} | {seen} | {"yes" if passed else "NO"} |', flush=True)
    failed += [] if passed else [case.name]
  if failed:
    raise UserError(f'the drill failed: {"; ".join(failed)} (their runs lie in {root})')
