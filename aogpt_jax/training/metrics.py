"""What a run reports: progress, log lines, metrics.jsonl, TensorBoard, optionally W&B."""

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import sys
from typing import Any

import jax

from aogpt_jax.config import Config, flatten
from aogpt_jax.training import event_files

log = logging.getLogger(__name__)


def _truncate_after(path: pathlib.Path, step: int) -> None:
  """Drops the records after `step`: the steps that a resumed run is about to do again."""
  if not path.exists():
    return
  kept = []
  for line in path.read_text(errors='replace').splitlines():
    try:
      if json.loads(line)['step'] <= step:
        kept.append(line + '\n')
    except (ValueError, KeyError, TypeError):  # cut short by a kill, or not ours
      continue
  unfinished = path.with_suffix('.tmp')
  unfinished.write_text(''.join(kept))
  os.replace(unfinished, path)  # a kill must not lose the history


class MetricWriter:
  """Writes scalars to metrics.jsonl, to TensorBoard event files and to W&B if asked.

  Only process 0 writes. Names carry their unit: 'train/nats_per_token'. `failure` says in a line
  why metrics.jsonl could not be written.
  """

  def __init__(self, config: Config, workdir: pathlib.Path, start_step: int):
    self.failure = ''
    self._active = jax.process_index() == 0
    self._wandb = None
    if not self._active:
      return
    path = workdir / 'metrics.jsonl'
    _truncate_after(path, start_step)
    self._file = open(path, 'a', buffering=1)
    self._board = event_files.open_board(workdir / 'tensorboard', start_step + 1)
    if config.train.wandb_project:
      import wandb
      self._wandb = wandb.init(project=config.train.wandb_project, name=workdir.name,
                               dir=str(workdir), config=flatten(config), resume='allow',
                               id=hashlib.sha256(str(workdir).encode()).hexdigest()[:16])

  def write(self, step: int, scalars: dict[str, float]) -> None:
    """Records scalars at a step (updates done)."""
    if not self._active:
      return
    try:
      self._file.write(json.dumps({'step': step, **scalars}) + '\n')
    except OSError as error:
      self.failure = f'{self._file.name}: cannot be written: {error.strerror}'
    for name, value in scalars.items():
      self._board.add_scalar(name, value, step)
    if self._wandb:
      self._wandb.log(scalars, step=step)

  def close(self) -> None:
    if not self._active:
      return
    with contextlib.suppress(OSError):  # `failure` has been said; this tries once more
      self._file.close()
    self._board.close()
    if self._wandb:
      self._wandb.finish()


class Progress:
  """A tqdm bar on a terminal, log lines elsewhere."""

  def __init__(self, total: int, start: int):
    from tqdm import tqdm
    self._on_terminal = sys.stderr.isatty()
    self._bar = tqdm(total=total, initial=start, unit='step', dynamic_ncols=True,
                     disable=not self._on_terminal or jax.process_index() != 0)

  def advance(self) -> None:
    self._bar.update()

  def report(self, step: int, total: int, scalars: dict[str, Any]) -> None:
    """Shows the newest metrics."""
    text = describe(scalars)
    if self._on_terminal:
      self._bar.set_postfix_str(text, refresh=False)
    elif jax.process_index() == 0:
      log.info('step %d/%d  %s', step, total, text)

  def say(self, text: str) -> None:
    """Prints a line without breaking the bar."""
    if self._on_terminal:
      self._bar.write(text, file=sys.stderr)
    elif jax.process_index() == 0:
      log.info('%s', text)

  def close(self) -> None:
    self._bar.close()


def describe(scalars: dict[str, float]) -> str:
  """One line of the metrics a person watches."""
  formats = {'nats_per_token': 'loss {:.3f} nats', 'perplexity': 'ppl {:.1f}',
             'grad_norm': 'grad {:.2f}', 'learning_rate': 'lr {:.1e}',
             'tokens_per_second': '{:,.0f} tok/s', 'mfu': 'MFU {:.1%}'}
  named = {name.removeprefix('train/'): value for name, value in scalars.items()}
  return '  '.join(text.format(named[name]) for name, text in formats.items() if name in named)
