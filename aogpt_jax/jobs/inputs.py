"""What a job is given to work on: one text from the command line, or the lines of a file."""

import json
import pathlib
import sys
from typing import Any

from aogpt_jax.errors import UserError


def read(text: str | None, path: str | None, mode: str, what: str, objects: bool = False,
         ) -> list[Any]:
  r"""The texts: one, or the lines of a file ('-': stdin); empty lines are left out.

  A line that starts with a double quote is a JSON string, so a text may hold newlines.

  Args:
    text: from --text.
    path: from --input.
    mode, what: for messages: the job, and what a text is to it.
    objects: whether a line that starts with a brace is a JSON object.

  Raises:
    UserError: unless exactly one of the two is given; for a file without a text, one that cannot be
      read, or a line that is no JSON string or object.
  """
  if (text is None) == (path is None):
    raise UserError(f'--text or --input is needed by --mode={mode}, and not both: {what}, or a '
                    'file of such lines, - for stdin')
  if text is not None:
    return [text]
  try:
    file = pathlib.Path(path).expanduser()
    content = sys.stdin.read() if path == '-' else file.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'--input={path}: cannot be read: '
                    f'{getattr(error, "strerror", None) or error}') from None
  starts, texts = ('"', '{') if objects else ('"',), []
  for number, line in enumerate(content.split('\n'), start=1):
    line = line.removesuffix('\r')
    if not line:
      continue
    try:
      texts.append(json.loads(line) if line.startswith(starts) else line)
    except ValueError as error:
      kind = 'a brace but is no JSON object' if line[0] == '{' else 'a quote but is no JSON string'
      raise UserError(f'--input={path}: line {number} starts with {kind}: {error}') from None
  if not texts:
    raise UserError(f'--input={path}: holds no text')
  return texts
