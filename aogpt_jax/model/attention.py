"""The one attention: causal over items in generation order, full, or over a cache by a mask.

Axes: B batch, T new items, S cached items, H heads, K head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aogpt_jax.model import attention_backends as backends


class Past(NamedTuple):
  """Cached keys and values of one layer, and who may see what.

  key, value: (B, H, K, S).
  cached_visible: (T, S) or (B, T, S) bool, whether new item t sees cached item s.
  new_visible: (T, T) or (B, T, T) bool, whether new item t sees new item u.
  """

  key: jax.Array
  value: jax.Array
  cached_visible: jax.Array
  new_visible: jax.Array


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
  """Rotary encoding: turns pair i of x by the angle positions * base^(-2i/K).

  Args:
    x: (B, T, H, K), float32; the pairs are (x[i], x[i + K/2]).
    positions: (B, T) int32, may be negative.
    base: longest wavelength over 2 pi, about, in positions.

  Returns:
    (B, T, H, K) float32.
  """
  half = x.shape[-1] // 2
  frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = positions[..., None, None].astype(jnp.float32) * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  first, second = x[..., :half], x[..., half:]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, past: Past | None,
           causal: bool = True, backend: str = 'auto') -> jax.Array:
  """Softmax attention with scale 1/sqrt(K); scores and softmax in float32.

  Args:
    query, key, value: (B, T, H, K) of the new items.
    past: None for attention among the new items; else the cache and its masks.
    causal: without `past`, whether item t sees only the items up to t, or all of them.
    backend: config.model.attention; see `attention_backends.choose`.

  Returns:
    (B, T, H, K) in the dtype of `value`.
  """
  name = backends.choose(backend, query, causal, past is not None, jax.default_backend())
  if name == 'blocked':
    return backends.blocked(query, key, value)
  if name != 'dense':
    return {'cudnn': backends.cudnn, 'splash': backends.splash}[name](query, key, value, causal)
  if past is None:
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal)
  # Two score blocks under one softmax: concatenating the cache itself would copy it at every step.
  items_last = lambda x: jnp.moveaxis(x, 1, -1)
  scores = jnp.concatenate([
      _scores(query, past.key, past.cached_visible),
      _scores(query, items_last(key), past.new_visible)], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  slots = past.key.shape[-1]
  mix = lambda w, v: jnp.einsum('bhts,bhks->bthk', w, v)
  return mix(weights[..., :slots], past.value) + mix(weights[..., slots:], items_last(value))


def _scores(query: jax.Array, key: jax.Array, visible: jax.Array) -> jax.Array:
  """Of key (B, H, K, S): (B, H, T, S) float32 scores, -inf where not visible."""
  scores = jnp.einsum('bthk,bhks->bhts', query, key, preferred_element_type=jnp.float32)
  visible = jnp.expand_dims(visible, -3)  # over heads
  return jnp.where(visible, scores * query.shape[-1] ** -0.5, -jnp.inf)
