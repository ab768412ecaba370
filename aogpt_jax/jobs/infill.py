"""--mode=infill: holes filled, from the command line, a file of lines, or stdin."""

import dataclasses
import json
import logging
import pathlib
import sys

from aogpt_jax import lm as lm_lib
from aogpt_jax.config import Config
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import outputs, sample

log = logging.getLogger(__name__)


def read_templates(text: str | None, path: str | None) -> list[str]:
  r"""The templates: one text, or the lines of a file ('-': stdin); empty lines are left out.

  A line that starts with a double quote is a JSON string, so a template may hold newlines.

  Raises:
    UserError: unless exactly one of the two is given; for a file without a template, one that
      cannot be read, or a line that is no JSON string.
  """
  if (text is None) == (path is None):
    raise UserError('--text or --input is needed by --mode=infill, and not both: a text with '
                    '<mask:k>, or a file of such lines, - for stdin')
  if text is not None:
    return [text]
  try:
    file = pathlib.Path(path).expanduser()
    content = sys.stdin.read() if path == '-' else file.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--input={path}: cannot be read: '
                    f'{getattr(error, "strerror", None) or error}') from None
  templates = []
  for number, line in enumerate(content.split('\n'), start=1):
    line = line.removesuffix('\r')
    try:
      templates += [json.loads(line) if line.startswith('"') else line] if line else []
    except ValueError as error:
      raise UserError(f'--input={path}: line {number} starts with a quote but is no JSON string: '
                      f'{error}') from None
  if not templates:
    raise UserError(f'--input={path}: holds no template')
  return templates


def run(config: Config, workdir: pathlib.Path, destination: outputs.Destination,
        text: str | None, path: str | None) -> None:
  """Fills every template config.sample.num_samples times; JSON lines unless it is one text."""
  texts = read_templates(text, path)
  lm = lm_lib.load(workdir)
  for number, template in enumerate(texts, start=1):
    try:
      lm_lib.check_template(template, lm.tokenizer, lm.config)
    except UserError as error:
      where = '--text' if path is None else f'--input={path}: template {number}'
      raise UserError(f'{where}: {error}') from None
  options = dataclasses.replace(config.sample, num_samples=max(1, config.sample.num_samples))
  if path is not None and not destination.output:
    destination = destination._replace(output='-')
  log.info('step %d of %s; only the sample section of --config is used', lm.step, workdir)
  caption = sample.describe(options, options.order or 'uniform', 0)
  outputs.write(lm.complete(texts, options), destination, len(texts) * options.num_samples, caption)
