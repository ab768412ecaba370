"""The detokenisers reproduce the pairs of the reference, and stay linear on hostile text."""

import json
import pathlib

import pytest

from aogpt_jax import data
from aogpt_jax.errors import UserError

PAIRS = json.loads(
    (pathlib.Path(__file__).parents[1] / 'golden' / 'detokenizers.json').read_text('utf-8'))


@pytest.mark.parametrize(('name', 'pair'), [(n, p) for n, pairs in PAIRS.items() for p in pairs])
def test_the_pairs_of_the_reference(name, pair):
  assert data.detokenize(name, pair['input']) == pair['output']


@pytest.mark.parametrize(('name', 'text', 'expected'), [
  ('wikitext', ' = = Two = = \n', ' == Two ==\n'),
  ('wikitext', 'a [ b ( c ] d ) e', 'a [b (c] d) e'),
  ('ptb', 'a N N N N b', 'a 1 1 1 1 b'),
  ('lm1b', '" Yes ? "', '"Yes?"'),
  ('lm1b', 'He said ( softly ) .', 'He said (softly) .'),
  ('none', ' a , b ', ' a , b '),
])
def test_what_the_pairs_do_not_show(name, text, expected):
  assert data.detokenize(name, text) == expected


@pytest.mark.parametrize('name', PAIRS)
@pytest.mark.parametrize('unit', ['(', '" ', "' ", '( ', ' ', 'a', ' N', ' . ', '[ (', " '"])
def test_a_million_of_anything_ends(name, unit):
  """A rule that tries every opening mark with every closing one takes hours here."""
  assert data.detokenize(name, unit * 10**6)


def test_an_unknown_name():
  with pytest.raises(UserError, match='detokenize=wikitex: .*did you mean "wikitext"'):
    data.detokenize('wikitex', '')
