"""Where generated texts go: the terminal, a file of JSON lines, a page that plays them."""

import json
import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tqdm

from aogpt_jax import completion as completion_lib
from aogpt_jax.completion import Completion
from aogpt_jax.errors import UserError
from aogpt_jax.report import viewer


class Destination(NamedTuple):
  """Files to write; '' is none. output: JSON lines, '-' for stdout. html: a self-contained page."""

  output: str = ''
  html: str = ''

  def check(self, source: str | None = None) -> None:
    """Raises UserError if a file cannot be one, or is the `source`: before anything is computed."""
    files = {'--input': source, '--output': self.output, '--html': self.html}
    files = {flag: name for flag, name in files.items() if name and name != '-'}
    paths = [pathlib.Path(name).expanduser().resolve() for name in files.values()]
    if len(set(paths)) < len(paths):
      raise UserError(f'{" and ".join(files)}: must be different files')
    if self.html == '-':
      raise UserError('--html=-: must be the name of a file; the page is not written to stdout')
    for (flag, name), path in zip(files.items(), paths):
      if flag == '--input':
        continue
      if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f'{flag}={name}: must be a file in a directory that exists')


TERMINAL = Destination()


def write(completions: Iterable[Completion], destination: Destination, total: int, caption: str,
          ) -> None:
  """Writes texts as they come: to stdout with rules between them, or as JSON lines.

  Args:
    completions: to write.
    destination: where to.
    total: how many there are, for the progress bar.
    caption: how they were generated, for the page.
  """
  shown, to_stdout = [], destination.output in ('', '-')
  progress = tqdm.tqdm(completions, total=total, unit='text', leave=False,
                       disable=not sys.stderr.isatty() or total < 2)
  file = sys.stdout
  try:
    if not to_stdout:
      file = open(pathlib.Path(destination.output).expanduser(), 'w', encoding='utf-8')
    for number, c in enumerate(progress, start=1):
      if destination.output:
        line = completion_lib.as_json(c)
        print(json.dumps(line, ensure_ascii=False), file=file, flush=True)
      else:
        print(f'--- {number}\n{c.text}', flush=True)
      if destination.html:
        shown.append(_sample(c, caption))
    if not to_stdout:
      file.close()
  except OSError as error:
    if to_stdout:
      raise
    raise UserError(f'--output={destination.output}: cannot be written: '
                    f'{error.strerror}') from None
  if not destination.output:
    print('---\n')
  if destination.html:
    viewer.write_html(pathlib.Path(destination.html).expanduser(), shown, caption)


def write_lines(lines: Iterable[str], output: str) -> None:
  """Writes lines to a file, or to stdout for '-'; UserError if the file cannot be written."""
  if output == '-':
    for line in lines:
      print(line)
    return
  try:
    pathlib.Path(output).expanduser().write_text(''.join(f'{line}\n' for line in lines), 'utf-8')
  except OSError as error:
    raise UserError(f'--output={output}: cannot be written: {error.strerror}') from None


def _sample(c: Completion, caption: str) -> viewer.Sample:
  known = np.isnan(c.log_prob)
  probability = np.exp(c.log_prob)
  return viewer.Sample(
      c.pieces, c.step.tolist(), [None if k else float(p) for k, p in zip(known, probability)],
      [None if k else int(r) for k, r in zip(known, c.rank)], caption)
