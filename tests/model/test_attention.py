"""Attention against a dense reference in numpy, and the rotary encoding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax.model import attention

B, T, S, H, K = 2, 3, 5, 2, 4


def _random(seed, *shape):
  return 2 * jax.random.normal(jax.random.key(seed), shape)


def _dense(query, key, value, visible):
  """Softmax attention in float64, written with loops; visible (B, T, S) bool."""
  query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
  out = np.zeros((*query.shape[:3], value.shape[-1]))
  for b, t, h in np.ndindex(*query.shape[:3]):
    seen = np.flatnonzero(visible[b, t])
    scores = key[b, seen, h] @ query[b, t, h] / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max())
    out[b, t, h] = weights / weights.sum() @ value[b, seen, h]
  return out


def test_without_past_it_is_causal():
  """Item t sees the items 0..t."""
  query, key, value = (_random(i, B, S, H, K) for i in range(3))
  got = attention.attend(query, key, value, None)
  visible = np.broadcast_to(np.tril(np.ones((S, S), bool)), (B, S, S))
  np.testing.assert_allclose(got, _dense(query, key, value, visible), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('batched_masks', [False, True])
def test_past_equals_dense_attention_over_all_items(batched_masks):
  """Cache and new items under one softmax, each behind its own mask, shared or one a row."""
  rng = np.random.default_rng(0)
  query, key, value = (_random(i, B, T, H, K) for i in range(3))
  past_key, past_value = (_random(i, B, S, H, K) for i in (3, 4))
  rows = (B,) if batched_masks else ()
  cached, new = rng.random((*rows, T, S)) < 0.5, rng.random((*rows, T, T)) < 0.5
  new |= np.eye(T, dtype=bool)
  items_last = lambda x: jnp.moveaxis(x, 1, -1)
  past = attention.Past(items_last(past_key), items_last(past_value), jnp.asarray(cached),
                        jnp.asarray(new))
  got = attention.attend(query, key, value, past)
  visible = np.broadcast_to(np.concatenate([cached, new], axis=-1), (B, T, S + T))
  want = _dense(query, np.concatenate([past_key, key], axis=1),
                np.concatenate([past_value, value], axis=1), visible)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('cached', [False, True])
def test_output_has_the_dtype_of_the_values(cached):
  """bfloat16 in, bfloat16 out, and within its rounding of float32."""
  query, key, value = (_random(i, B, T, H, K) for i in range(3))
  low = lambda x: x.astype(jnp.bfloat16)
  masks = (jnp.ones((T, T), bool), jnp.eye(T, dtype=bool))
  last = lambda x: jnp.moveaxis(x, 1, -1)
  past = lambda f: attention.Past(f(last(key)), f(last(value)), *masks) if cached else None
  got = attention.attend(low(query), low(key), low(value), past(low))
  chex.assert_type(got, jnp.bfloat16)
  want = attention.attend(query, key, value, past(lambda x: x))
  np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=0.1)


def test_rotation_turns_pairs_by_position_times_frequency():
  """Pair i, as a complex number, times exp(i · position · base^(-2i/K)); negative positions too."""
  x = np.asarray(_random(0, B, T, H, 6))
  positions = np.array([[-1, 0, 7], [3, 40, 2]])
  got = np.asarray(attention.rotate(jnp.asarray(x), jnp.asarray(positions), 50.0))
  angles = positions[:, :, None, None] * 50.0 ** (-2 * np.arange(3) / 6)
  turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)
  np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=-1),
                             rtol=1e-4, atol=1e-5)


def test_rotation_keeps_norms_and_depends_on_distance():
  """|Rx| = |x|, and <R(p) x, R(q) y> depends on p - q alone."""
  x, y = _random(0, 1, T, H, K), _random(1, 1, T, H, K)
  rotate = lambda x, at: attention.rotate(x, jnp.full((1, T), at), 100.0)
  np.testing.assert_allclose(jnp.linalg.norm(rotate(x, 9), axis=-1),
                             jnp.linalg.norm(x, axis=-1), rtol=1e-5)
  dot = lambda p, q: (rotate(x, p) * rotate(y, q)).sum(axis=-1)
  np.testing.assert_allclose(dot(9, 4), dot(5, 0), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(dot(2, 5), dot(-1, 2), rtol=1e-4, atol=1e-5)
  assert np.abs(dot(9, 4) - dot(4, 9)).max() > 0.1
