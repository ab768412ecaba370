"""Order distributions: permutations, reproducible row by row, with the stated laws."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aogpt_jax import orders as orders_lib
from aogpt_jax.errors import UserError

CASES = {
    'left_to_right': {},
    'uniform': {},
    'mixture': {'random_ratio': 0.5},
    'fixed': {'seed': 3},
    'blockwise': {'block_size': 4, 'inner': 'random'},
}
KEY = jax.random.key(11)


def _sample(name, batch, length, first_row=0, **options):
  return np.asarray(orders_lib.make(name, **options).sample(KEY, batch, length, first_row))


@pytest.mark.parametrize('name', CASES)
def test_rows_are_permutations_and_jit_equals_eager(name):
  """int32 permutations; under jit, with a traced first row, the same ones."""
  order = orders_lib.make(name, **CASES[name])
  eager = order.sample(KEY, 6, 12, 5)
  jitted = jax.jit(lambda key, first: order.sample(key, 6, 12, first))(KEY, 5)
  chex.assert_shape(eager, (6, 12))
  chex.assert_type(eager, jnp.int32)
  chex.assert_trees_all_equal(eager, jitted)
  np.testing.assert_array_equal(np.sort(eager, axis=1), np.tile(np.arange(12), (6, 1)))


@pytest.mark.parametrize('name', CASES)
def test_row_depends_on_its_number_alone(name):
  """A batch cut into pieces of 3, 1 and 4 rows equals the whole."""
  whole = _sample(name, 8, 12, 10, **CASES[name])
  pieces = [_sample(name, size, 12, first, **CASES[name])
            for first, size in ((10, 3), (13, 1), (14, 4))]
  np.testing.assert_array_equal(whole, np.concatenate(pieces))


@pytest.mark.parametrize('name', ['uniform', 'mixture', 'blockwise'])
def test_rows_and_keys_differ(name):
  """8 rows of 12: a repeated row means that the row is not in the key."""
  options = CASES[name] | ({'random_ratio': 1.0} if name == 'mixture' else {})
  rows = _sample(name, 8, 12, **options)
  assert len(np.unique(rows, axis=0)) == 8
  other = orders_lib.make(name, **options).sample(jax.random.key(12), 8, 12)
  assert (np.asarray(other) != rows).any(axis=1).all()


def _counts(orders):
  """How often each permutation occurs, in the order of itertools.permutations."""
  length = orders.shape[1]
  code = lambda x: (np.asarray(x) * length ** np.arange(length)).sum(axis=-1)
  all_codes = [code(p) for p in itertools.permutations(range(length))]
  counts = np.array([(code(orders) == c).sum() for c in all_codes])
  assert counts.sum() == len(orders)
  return counts


def test_uniform_is_uniform():
  """Chi-square over the 24 orders of length 4."""
  assert scipy.stats.chisquare(_counts(_sample('uniform', 24 * 500, 4))).pvalue > 1e-4


@pytest.mark.parametrize('ratio', [0.25, 0.9])
def test_mixture_is_uniform_or_identity(ratio):
  """Chi-square over 24 orders: ratio / 24 each, 1 - ratio on top for the identity."""
  counts = _counts(_sample('mixture', 24 * 500, 4, random_ratio=ratio))
  expected = np.full(24, ratio / 24)
  expected[0] += 1 - ratio
  assert scipy.stats.chisquare(counts, expected * counts.sum()).pvalue > 1e-4


def test_mixture_edges():
  """0.0: always the identity; 1.0: never more often than chance; 0.9 unless said."""
  identity = np.arange(12)
  is_identity = lambda **options: (_sample('mixture', 400, 12, **options) == identity).all(axis=1)
  assert is_identity(random_ratio=0.0).all()
  assert not is_identity(random_ratio=1.0).any()
  assert 0.04 < is_identity().mean() < 0.17


def test_fixed_by_seed_and_given():
  """One order for all rows and keys; another seed gives another; a given one is itself."""
  drawn = _sample('fixed', 4, 12, seed=3)
  assert (drawn == drawn[0]).all()
  np.testing.assert_array_equal(
      orders_lib.make('fixed', seed=3).sample(jax.random.key(99), 4, 12), drawn)
  assert (_sample('fixed', 1, 12, seed=4) != drawn[0]).any()
  assert (drawn[0] != np.arange(12)).any()
  np.testing.assert_array_equal(_sample('fixed', 3, 4, permutation=(2, 0, 3, 1)),
                                [[2, 0, 3, 1]] * 3)


def test_blockwise():
  """Blocks left to right; inside: the given order, one drawn for all, or one for each block."""
  given = _sample('blockwise', 2, 8, block_size=4, permutation=(0, 2, 3, 1))
  np.testing.assert_array_equal(given, [[0, 2, 3, 1, 4, 6, 7, 5]] * 2)
  drawn = _sample('blockwise', 3, 24, block_size=6, seed=1).reshape(3, 4, 6)
  random = _sample('blockwise', 3, 24, block_size=6, inner='random', seed=1).reshape(3, 4, 6)
  for blocks in (drawn, random):
    np.testing.assert_array_equal(blocks // 6, np.tile(np.arange(4)[:, None], (3, 1, 6)))
  assert (drawn % 6 == drawn[0, 0]).all()
  assert (drawn[0, 0] != np.arange(6)).any()
  assert len(np.unique((random % 6).reshape(12, 6), axis=0)) == 12


@pytest.mark.parametrize(('name', 'options', 'message'), [
    ('unifrom', {}, "order 'unifrom'.*did you mean \"uniform\""),
    ('mixture', {'random_ration': 0.5}, "'random_ration'; did you mean \"random_ratio\""),
    ('uniform', {'seed': 1}, "order 'uniform' has no option 'seed'"),
    ('blockwise', {'inner': 'randm'}, "inner='randm'.*did you mean \"random\"")])
def test_unknown_names(name, options, message):
  with pytest.raises(UserError, match=message):
    orders_lib.make(name, **options)


@pytest.mark.parametrize(('name', 'options', 'message'), [
    ('fixed', {'permutation': (0, 1, 1)}, r'permutation=\(0, 1, 1\): must hold each of 0..7 once'),
    ('blockwise', {'permutation': (0, 1, 2)}, r'each of 0..3 once, the length of the block'),
    ('blockwise', {'block_size': 3}, 'block_size=3: must divide the sequence length 8')])
def test_lengths_that_do_not_fit(name, options, message):
  with pytest.raises(UserError, match=message):
    _sample(name, 2, 8, **options)
