"""Text that was published in tokens, put back into the form in which people write it.

The evaluation corpora come with spaces around punctuation, '@-@' for a hyphen inside a word, 'N'
for a number. The paper measures perplexity after the detokenisers of SEDD; these reproduce their
input/output pairs (tests/golden/detokenizers.json), oddities included: they are part of the
figures that others report. Each is one pass over a table and linear in the text.
"""

import re
from collections.abc import Callable

from aogpt_jax.errors import UserError, nearest

# The order of the lines is part of the rule: a pair of apostrophes is looked for after "s '" has
# become "s'" and before " 's" becomes "'s".
_WIKITEXT_FIRST = (
  ("s '", "s'"),
  (' @-@ ', '-'), (' @,@ ', ','), (' @.@ ', '.'),
  (' : ', ': '), (' ; ', '; '), (' . ', '. '), (' ! ', '! '), (' ? ', '? '), (' , ', ', '),
)
_WIKITEXT_PAIRS = ('()', '[]', '{}', '""', "''")
_WIKITEXT_LAST = (
  ('= = = =', '===='), ('= = =', '==='), ('= =', '=='),
  (' \u00b0 ', '\u00b0'), (' \n', '\n'), ('\n ', '\n'), (' N ', ' 1 '), (" 's", "'s"),
)

_PTB = (
  (" 's", "'s"), ("s ' ", "s' "), (" n't", "n't"), (' \n ', '\n'), ('\\/', '/'),
  # Twice: in 'N N' both need the space between them.
  (' N ', ' 1 '), (' N ', ' 1 '),
  ('$ 1', '$1'), ('# 1', '#1'), ('<unk>', '?'),
)

_LM1B = tuple((re.compile(pattern), replacement) for pattern, replacement in (
  (r'(https?) : / / ', r'\1://'),
  (r" '(?=\w)", "'"),
  # A full stop goes to the word before it, not to a bracket or a quote.
  (r' (\w+) \. ', r' \1. '), (r' (\w+) \.$', r' \1.'),
  (r' ([?!]) ', r'\1 '), (r' ([?!])$', r'\1'),
  (r' ([,:;]) ', r'\1 '),
  (' / ', '/'),
  (r'" ([^"]+) "', r'"\1"'), (r"' ([^']+) '", r"'\1'"),
  (r'\( ([^()]+) \)', r'(\1)'), (r'\[ ([^\[\]]+) \]', r'[\1]'),
  ('([$\u00a3]) ', r'\1'),
))


def detokenize(name: str, text: str) -> str:
  """Applies the detokeniser of a corpus to one document.

  Args:
    name: wikitext, ptb, lm1b or lambada; 'none' returns the text as it is.
    text: the document as the corpus has it.

  Raises:
    UserError: for another name.
  """
  check_detokenizer(name)
  return DETOKENIZERS[name](text)


def check_detokenizer(name: str) -> None:
  """Raises UserError if there is no detokeniser of this name."""
  if name not in DETOKENIZERS:
    raise UserError(f'detokenize={name}: no such detokeniser{nearest(name, DETOKENIZERS)}')


def _replace(text: str, table: tuple[tuple[str, str], ...]) -> str:
  for old, new in table:
    text = text.replace(old, new)
  return text


def _strip_inside(text: str, opening: str, closing: str) -> str:
  """Drops white space behind each opening mark and before the next closing one.

  Pairs do not nest: '( a ( b )' is one pair.
  """
  parts, at = [], 0
  while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start + 1)) >= 0:
    parts += [text[at:start], opening, text[start + 1:end].strip(), closing]
    at = end + 1
  return ''.join(parts) + text[at:]


def _wikitext(text: str) -> str:
  text = _replace(text, _WIKITEXT_FIRST)
  for opening, closing in _WIKITEXT_PAIRS:
    text = _strip_inside(text, opening, closing)
  return _replace(text, _WIKITEXT_LAST)


def _ptb(text: str) -> str:
  return _replace(text, _PTB)


def _lm1b(text: str) -> str:
  for pattern, replacement in _LM1B:
    text = pattern.sub(replacement, text)
  return text


def _lambada(text: str) -> str:
  return '\n' + text.replace('\u201c', '"').replace('\u201d', '"').strip()


DETOKENIZERS: dict[str, Callable[[str], str]] = {
  'none': str, 'wikitext': _wikitext, 'ptb': _ptb, 'lm1b': _lm1b, 'lambada': _lambada}
