r"""Texts with holes: `<mask:k>` stands for k tokens, `<mask>` for one, `\<mask>` for itself.

A backslash right before a hole is written twice: `\\<mask>` is a backslash and a hole.

What stands between two holes is tokenized by itself, so known text does not merge with what is
filled in: it comes back byte for byte, and a hole of k tokens is k tokens.
"""

import re
from typing import NamedTuple

import numpy as np

from aogpt_jax.config import check
from aogpt_jax.data.tokenizers import Tokenizer

_HOLE = re.compile(r'(\\*)<mask(?::([^<>\s]*))?>')


class Template(NamedTuple):
  """A parsed template.

  parts: in order, a known text (str) or a hole's number of tokens (int).
  tokens: (n,) int32, 0 in the holes. known: (n,) bool.
  """

  parts: tuple[str | int, ...]
  tokens: np.ndarray
  known: np.ndarray


def _hole_width(hole: re.Match, context_length: int) -> int:
  digits = '1' if hole[2] is None else hole[2]
  width = int(digits) if re.fullmatch('[0-9]{1,9}', digits) else -1
  check(1 <= width <= context_length, 'template', hole[0][:40],
        f'a hole is <mask:k> with k in 1..{context_length} tokens, the context_length of this '
        r'model; write \<mask> for the text itself')
  return width


def parse(text: str, tokenizer: Tokenizer, context_length: int) -> Template:
  """Tokenizes a text with holes; one without a hole is all known.

  Raises:
    UserError: for an empty text, a hole that is not 1..context_length tokens, one longer than the
      context; for a hole without spaces around it where the tokenizer is one of ids.
  """
  check(isinstance(text, str) and text, 'template', text, 'must be a text that is not empty')
  parts, end, known_text = [], 0, ''
  for hole in _HOLE.finditer(text):
    known_text += text[end:hole.start()]
    end = hole.end()
    backslashes = len(hole[1])
    known_text += hole[1][:backslashes // 2]
    if backslashes % 2:
      known_text += hole[0][backslashes:]
      continue
    parts += [known_text, _hole_width(hole, context_length)]
    known_text = ''
  parts = tuple(part for part in (*parts, known_text + text[end:]) if part)
  ids = [np.zeros(part, np.int32) if isinstance(part, int) else tokenizer.encode(part)
         for part in parts]
  if tokenizer.spaced:
    _check_spaces(text, parts)
  known = [np.full(len(x), isinstance(part, str)) for x, part in zip(ids, parts)]
  tokens = np.concatenate(ids).astype(np.int32)
  check(1 <= len(tokens) <= context_length, 'template', text[:80],
        f'has {len(tokens)} tokens, must have 1..{context_length}, the context_length of this '
        'model')
  return Template(parts, tokens, np.concatenate(known))


def escape(text: str) -> str:
  r"""Makes a text a template without holes: `<mask>` becomes `\<mask>`."""
  return _HOLE.sub(lambda hole: hole[1] * 2 + '\\' + hole[0][len(hole[1]):], text)


def _check_spaces(text: str, parts: tuple[str | int, ...]) -> None:
  for left, right in zip(parts, parts[1:]):
    touch = (isinstance(left, int) and isinstance(right, int)
             or isinstance(left, str) and not left[-1].isspace()
             or isinstance(right, str) and not right[0].isspace())
    check(not touch, 'template', text, 'has no space between a hole and its neighbour; write '
          '"3 <mask:2> 5"')


def pieces(template: Template, tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
  """The text of every token (n,) of a filled template; joined, they are the whole text."""
  texts, at, blank = [], 0, ''
  for part in template.parts:
    width = part if isinstance(part, int) else len(tokenizer.encode(part))
    ids = tokens[at:at + width]
    if tokenizer.spaced and isinstance(part, str):  # as it was written, spaces included
      words = re.findall(r'\s*\S+', part)
      rest = part[len(''.join(words)):]
    else:
      words, rest = tokenizer.pieces(ids), ''
    if words:
      words[0] = blank + words[0]
      blank = ''
    texts += words
    blank += rest
    at += width
  texts[-1] += blank
  return texts
