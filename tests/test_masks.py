"""Masks of the masked-diffusion bound: evenly spread times, the promised ratios, the weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import masks
from aogpt_jax.errors import UserError


def test_antithetic_times_are_an_even_grid_with_a_random_shift():
  """Gaps of exactly 1/B, values in (0, 1], and a shift that the key decides, uniform over keys."""
  times = np.sort(masks.antithetic_times(jax.random.key(0), jnp.arange(8), 8))
  assert 0 < times[0] <= 1 / 8 + 1e-6 and times[-1] <= 1
  np.testing.assert_allclose(np.diff(times), 1 / 8, atol=1e-6)
  keys = jax.random.split(jax.random.key(1), 2000)
  first = jax.vmap(lambda k: masks.antithetic_times(k, jnp.arange(1), 8)[0])(keys)
  np.testing.assert_allclose(np.histogram(first, 4, (0, 1))[0], 500, atol=100)


@pytest.mark.parametrize('masking', ['linear', 'cosine', 'count'])
def test_a_row_depends_on_its_own_number_alone(masking):
  """A batch cut into pieces gives the masks of the whole; another key gives others."""
  whole = masks.sample(masking, jax.random.key(3), jnp.arange(6), 6, 32)
  part = masks.sample(masking, jax.random.key(3), jnp.array([4, 1]), 6, 32)
  chex.assert_trees_all_equal(part, jax.tree.map(lambda x: x[jnp.array([4, 1])], whole))
  other = masks.sample(masking, jax.random.key(4), jnp.arange(6), 6, 32)
  assert (np.asarray(whole.masked) != np.asarray(other.masked)).any(axis=1).all()
  assert len({row.tobytes() for row in np.asarray(whole.masked)}) == 6
  chex.assert_shape(whole, [(6, 32), (6,)])


@pytest.mark.parametrize(('masking', 'ratio', 'slope'), [
    ('linear', lambda t: t, lambda t: np.ones_like(t)),
    ('cosine', lambda t: 1 - np.cos(np.pi * t / 2), lambda t: np.pi / 2 * np.sin(np.pi * t / 2))])
def test_ratio_and_weight_follow_the_schedule(masking, ratio, slope):
  """Of 4,000 tokens a share λ(t) is masked (5 sigma), and the weight is λ'(t)/λ(t)."""
  times = np.array([0.02, 0.3, 0.77, 1.0])
  rows = [masks._mask_row(masking, jax.random.key(i), jnp.float32(t), 4000)
          for i, t in enumerate(times)]
  masked = np.array([row.masked.mean() for row in rows])
  want = ratio(times)
  assert (np.abs(masked - want) <= 5 * np.sqrt(want * (1 - want) / 4000) + 1e-6).all()
  np.testing.assert_allclose([row.weight for row in rows], slope(times) / want, rtol=1e-4)


def test_count_masks_exactly_that_many_at_uniform_places():
  """⌈t·n⌉ tokens with weight n/k, each position as often as another; even times give every k."""
  drawn = masks.sample('count', jax.random.key(0), jnp.arange(4000), 4000, 5)
  counts = np.asarray(drawn.masked).sum(axis=1)
  np.testing.assert_allclose(np.bincount(counts, minlength=6), [0] + [800] * 5, atol=1)
  np.testing.assert_allclose(drawn.weight, 5 / counts, rtol=1e-6)
  np.testing.assert_allclose(np.asarray(drawn.masked).mean(axis=0), 0.6, atol=5 * 0.5 / 4000 ** 0.5)


def test_unknown_masking():
  with pytest.raises(UserError, match="masking='cosin'.*cosine"):
    masks.sample('cosin', jax.random.key(0), jnp.arange(1), 1, 4)
