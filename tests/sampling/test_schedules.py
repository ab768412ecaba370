"""Reveal schedules: the reference's counts, exactly."""

import json
import pathlib

import numpy as np
import pytest

from aogpt_jax.errors import UserError
from aogpt_jax.sampling import reveal_counts
from aogpt_jax.sampling.schedules import reveal_turns

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'reveal_schedules.json'


def test_counts_of_the_reference():
  """Every kind, length and number of steps of the golden file, float32 rounding included."""
  golden = json.loads(GOLDEN.read_text())
  assert {name.split('/')[0] for name in golden} == {'linear', 'cosine'}
  for name, want in golden.items():
    kind, length, steps = name.split('/')
    np.testing.assert_array_equal(reveal_counts(kind, int(length), int(steps)), want, err_msg=name)


@pytest.mark.parametrize('kind', ['linear', 'cosine'])
def test_every_step_reveals_something_and_the_last_all(kind):
  """Strictly increasing to n, for every number of steps of n = 37."""
  for steps in range(1, 38):
    counts = reveal_counts(kind, 37, steps)
    assert len(counts) == steps and counts[-1] == 37
    assert (np.diff([0, *counts]) >= 1).all()


def test_counts_are_rounded_in_float32():
  """100 in 5 steps: 1 - τ is 0.19999999 … in float32; a product in float64 would give 59, 79."""
  np.testing.assert_array_equal(reveal_counts('linear', 100, 5), [19, 39, 60, 80, 100])


@pytest.mark.parametrize(('arguments', 'message'), [
    (('linar', 8, 2), "schedule='linar'.*did you mean \"linear\""),
    (('linear', 8, 9), 'steps=9: must be in 1..8'), (('cosine', 8, 0), 'steps=0: must be in 1..8')])
def test_errors(arguments, message):
  with pytest.raises(UserError, match=message):
    reveal_counts(*arguments)


def test_turns_by_hand():
  """Order 2, 0, 3, 1 with one given and groups of 1 and 2; a row that ends early; a full one."""
  orders = np.array([[2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 1, 0]])
  known = np.array([[1, 2, 4], [2, 3, 3], [4, 4, 4]])
  np.testing.assert_array_equal(reveal_turns(orders, known),
                                [[0, 1, -1, 1], [-1, -1, 0, -1], [-1, -1, -1, -1]])
