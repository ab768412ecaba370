"""Templates: what is a hole, what is text, and that filling changes no known byte."""

import numpy as np
import pytest

from aogpt_jax import templates
from aogpt_jax.data import tokenizers
from aogpt_jax.errors import UserError


@pytest.fixture(scope='module')
def bpe():
  return tokenizers.train_sentencepiece(['One two three, four.\nfünf 日本語 \t six.\n'] * 30, 300)


def test_parts_tokens_and_known(bpe):
  """Each text by itself, zeros in the holes; `<mask>` is one token."""
  template = templates.parse('a<mask:2>two<mask>', bpe, 16)
  assert template.parts == ('a', 2, 'two', 1)
  want = [*bpe.encode('a'), 0, 0, *bpe.encode('two'), 0]
  np.testing.assert_array_equal(template.tokens, want)
  np.testing.assert_array_equal(template.known, np.array(want) != 0)
  assert template.tokens.dtype == np.int32


@pytest.mark.parametrize(('text', 'parts'), [
    (r'\<mask> x', ('<mask> x',)), (r'a \<mask:3><mask:3>', ('a <mask:3>', 3)),
    ('\\\\<mask>', ('\\', 1)), (r'a\\\<mask>', (r'a\<mask>',)), ('<mask:2><mask>', (2, 1)),
    ('<masks> <mask', ('<masks> <mask',)),
    ('no hole', ('no hole',))])
def test_what_is_text(bpe, text, parts):
  assert templates.parse(text, bpe, 64).parts == parts


@pytest.mark.parametrize('text', [
    '<mask>', r'\<mask:2>', 'a <mask:> b', '<mask', 'x \\', 'ü<mask:9>',
    '<mask:', '<mask: 3> z', r'\\<mask:1>', '<mask:a b>', '<mask:<mask>>'])
def test_an_escaped_text_has_no_hole_and_is_itself(bpe, text):
  assert templates.parse(templates.escape(text), bpe, 64).parts == (text,)


@pytest.mark.parametrize('text', [
    'One <mask:2> three', '<mask:4>日本<mask>\n', 'no hole \t', 'é<mask:3>'])
def test_pieces_are_one_a_token_and_join_to_the_text(bpe, text):
  """Characters of several tokens, newlines and bytes that are no UTF-8 included."""
  template = templates.parse(text, bpe, 64)
  tokens = template.tokens.copy()
  tokens[~template.known] = np.random.default_rng(0).integers(2, 259, (~template.known).sum())
  pieces = templates.pieces(template, bpe, tokens)
  assert len(pieces) == len(tokens)
  want, at = '', 0
  for part in template.parts:
    width = part if isinstance(part, int) else len(bpe.encode(part))
    want += part if isinstance(part, str) else bpe.decode(tokens[at:at + width])
    at += width
  assert ''.join(pieces) == want


@pytest.mark.parametrize(('text', 'filled'), [
    ('3 <mask:2> 5', '3 1 2 5'), (' 3  17 <mask>', ' 3  17 1'), ('<mask> <mask:2>', '1 2 3'),
    (' <mask> ', ' 1 ')])
def test_ids_keep_their_spaces(text, filled):
  """Ids are written with the template's own spaces around them."""
  tokenizer = tokenizers.IdsTokenizer(20)
  template = templates.parse(text, tokenizer, 8)
  tokens = template.tokens.copy()
  tokens[~template.known] = 1 + np.arange((~template.known).sum())
  assert ''.join(templates.pieces(template, tokenizer, tokens)) == filled


@pytest.mark.parametrize('text', ['3<mask> 5', '3 <mask>5', '<mask><mask>'])
def test_ids_need_spaces(text):
  with pytest.raises(UserError, match='no space between a hole and its neighbour'):
    templates.parse(text, tokenizers.IdsTokenizer(20), 8)
