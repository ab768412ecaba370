"""A web page that plays how texts were generated, token by token in the model's own order.

The page is one file: style, script and data are inside, nothing is loaded, so it opens from disk
and can be mailed. Its template is `viewer.html`, next to this file.
"""

import html
import importlib.resources
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from aogpt_jax.config import check
from aogpt_jax.errors import UserError

GIVEN = -1  # the step of a token that the user gave


class Sample(NamedTuple):
  """One generated text. The lists have one entry a token, in the order of the text.

  Attributes:
    pieces: text of each token; ''.join(pieces) is the whole text. A piece may be empty.
    step: the step, from 0, that revealed the token; -1: the user gave it.
    probability: the model's probability of the token when it was drawn; None where unknown.
    rank: how many ids were more probable, 0 for the most probable one; None where unknown.
    caption: what the reader should know of this text, such as the template or the settings.
  """

  pieces: Sequence[str]
  step: Sequence[int]
  probability: Sequence[float | None]
  rank: Sequence[int | None]
  caption: str = ''


def _check_sample(sample: Sample, name: str) -> None:
  lists = sample._asdict()
  for field in ('step', 'probability', 'rank'):
    if len(lists[field]) != len(sample.pieces):
      raise UserError(f'{name}.{field}: has {len(lists[field])} entries, but {name}.pieces has '
                      f'{len(sample.pieces)}; every token needs one of each')
  for i, step in enumerate(sample.step):
    check(step >= GIVEN, f'{name}.step[{i}]', step, f'must be at least {GIVEN}, a given token')
  for i, value in enumerate(sample.probability):
    check(value is None or 0 <= value <= 1, f'{name}.probability[{i}]', value,
          'must be in [0, 1], or None')
  for i, value in enumerate(sample.rank):
    check(value is None or value >= 0, f'{name}.rank[{i}]', value, 'must be at least 0, or None')


def _short(probability: float | None) -> float | None:
  """Four digits are more than the page shows, and keep it small."""
  return None if probability is None else float(f'{probability:.4g}')


def _json_sample(sample: Sample) -> dict[str, Any]:
  return {
      'pieces': list(sample.pieces),
      'step': [int(step) for step in sample.step],
      'probability': [_short(value) for value in sample.probability],
      'rank': [None if value is None else int(value) for value in sample.rank],
      'caption': sample.caption,
  }


def _json_in_html(values: Any) -> str:
  """JSON that no text can end: without '<', in ASCII."""
  return json.dumps(values, allow_nan=False, separators=(',', ':')).replace('<', r'\u003c')


def to_html(samples: Sequence[Sample], title: str = '') -> str:
  """Returns the page that `write_html` writes."""
  check(len(samples) > 0, 'samples', samples, 'must hold at least one text')
  for i, sample in enumerate(samples):
    _check_sample(sample, f'samples[{i}]')
  title = title or 'Texts generated in any order'
  values = {
      'title': html.escape(title),
      'data': _json_in_html({'title': title, 'samples': [_json_sample(s) for s in samples]}),
  }
  template = importlib.resources.files(__package__).joinpath('viewer.html').read_text('utf-8')
  # One pass: a title that looks like a placeholder stays as it is.
  return re.sub(r'\{\{(title|data)\}\}', lambda match: values[match[1]], template)


def write_html(path: str | os.PathLike[str], samples: Sequence[Sample], title: str = '') -> None:
  """Writes one page that plays the generation of `samples`; see the module's docstring.

  A reader of `path` sees the old file or the new one, never a part. Missing folders are made.

  Args:
    path: the file, by custom NAME.html.
    samples: the texts; the page shows one at a time.
    title: heading of the page.

  Raises:
    UserError: for no samples, lists of different lengths, impossible values, or a file that cannot
      be written.
  """
  page = to_html(samples, title).encode('utf-8', errors='xmlcharrefreplace')
  path = pathlib.Path(path)
  unfinished = path.with_name(f'{path.name}.tmp-{os.getpid()}')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      unfinished.write_bytes(page)
      os.replace(unfinished, path)
    finally:
      unfinished.unlink(missing_ok=True)
  except OSError as error:
    raise UserError(f'{path}: cannot be written: {error.strerror}') from None
