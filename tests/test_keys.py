"""Random streams: a pure function of (seed, stream, step, row), without collisions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import keys


def _grid(seed, stream, steps, rows):
  """Raw keys (steps * rows, 2) of one stream."""
  of_step = lambda step: keys.row_keys(keys.stream_key(seed, stream, step), jnp.arange(rows))
  grid = jax.vmap(of_step)(jnp.arange(steps))
  return np.asarray(jax.random.key_data(grid)).reshape(steps * rows, -1)


def test_no_two_keys_collide():
  """Over seeds x streams x steps x rows every key occurs once (fails if a part is not folded)."""
  grids = [_grid(seed, stream, 20, 50) for seed in (0, 1, 2) for stream in keys.STREAMS]
  assert len(np.unique(np.concatenate(grids), axis=0)) == 3 * len(keys.STREAMS) * 20 * 50


def test_same_arguments_give_the_same_key_jitted_or_not():
  """A restart, which traces the step number, sees the same keys as a script that passes ints."""
  eager = keys.row_keys(keys.stream_key(3, 'order', 7), jnp.array([4, 2]))
  jitted = jax.jit(lambda seed, step, rows: keys.row_keys(
      keys.stream_key(seed, 'order', step), rows))(3, 7, jnp.array([4, 2]))
  chex.assert_trees_all_equal(jax.random.key_data(eager), jax.random.key_data(jitted))
  alone = keys.row_keys(keys.stream_key(3, 'order', 7), jnp.array([2]))
  chex.assert_trees_all_equal(jax.random.key_data(eager[1]), jax.random.key_data(alone[0]))


def test_streams_keep_their_numbers():
  """A stream inserted in the middle would silently change the numbers of every old run."""
  assert keys.STREAMS[:5] == ('init', 'order', 'dropout', 'eval', 'sample')
  for index, stream in enumerate(keys.STREAMS):
    want = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), index), 9)
    chex.assert_trees_all_equal(jax.random.key_data(keys.stream_key(5, stream, 9)),
                                jax.random.key_data(want))


def test_unknown_stream():
  with pytest.raises(ValueError):
    keys.stream_key(0, 'ordre')
