"""The key/value cache of generation, which grows in a few segments of static length.

Every step reads all slots of its segment, filled or not, so segments keep that work near to what is
filled. Axes: B batch, T new items, S slots, H heads, K head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax.config import ModelConfig
from aogpt_jax.model.attention import to_cache

MAX_SEGMENTS = 4  # each is compiled apart
MIN_SEGMENT = 64  # slots

Layers = list[tuple[jax.Array, jax.Array]]  # keys and values of each layer


class Cache(NamedTuple):
  """Keys and values of past items.

  layers: keys (B, H, K, S) and values (B, H, S, K) of each, see `attention.Past`.
  valid: (B, S) bool, the slots that hold an item of the row; others hold padding or garbage.
  """

  layers: Layers
  valid: jax.Array


def empty_layers(config: ModelConfig, batch: int, slots: int) -> Layers:
  """Zeros for every layer, in config.dtype."""
  zeros = lambda *shape: jnp.zeros((batch, config.num_heads, *shape), jnp.dtype(config.dtype))
  return [(zeros(config.head_dim, slots), zeros(slots, config.head_dim))
          for _ in range(config.num_layers)]


def empty(config: ModelConfig, batch: int, slots: int) -> Cache:
  """A cache without items."""
  return Cache(empty_layers(config, batch, slots), jnp.zeros((batch, slots), bool))


def write(cache: Cache, new: Layers, first: int, last: int, slot: jax.Array, valid: jax.Array,
          ) -> Cache:
  """Writes the new items [first, last) to the slots from `slot` on.

  Args:
    cache: to write to.
    new: keys and values (B, T, H, K) of each layer.
    first, last: which of the T.
    slot: () int32.
    valid: (B, last - first) bool.
  """
  put = lambda old, x, axis: jax.lax.dynamic_update_slice_in_dim(old, x, slot, axis)
  layers = []
  for (old_key, old_value), (key, value) in zip(cache.layers, new, strict=True):
    key, value = to_cache(key[:, first:last], value[:, first:last])
    layers.append((put(old_key, key, -1), put(old_value, value, -2)))
  return Cache(layers, put(cache.valid, valid, -1))


def after(slot: jax.Array, hidden: jax.Array) -> jax.Array:
  """`slot`, made to depend on what a step computed, (B, T, d), so that its writes follow its reads.

  Without it XLA may not order them, and copies the whole cache at every step.
  """
  return slot + jnp.isnan(hidden[0, 0, 0])


def grow_layers(layers: Layers, slots: int) -> Layers:
  """Adds empty slots, up to `slots`."""
  more = (0, slots - layers[0][0].shape[-1])
  none = (0, 0)
  return [(jnp.pad(key, (none, none, none, more)), jnp.pad(value, (none, none, more, none)))
          for key, value in layers]


def grow(cache: Cache, slots: int) -> Cache:
  """Adds empty slots, up to `slots`."""
  more = (0, slots - cache.valid.shape[1])
  return Cache(grow_layers(cache.layers, slots), jnp.pad(cache.valid, ((0, 0), more)))


def cut(first: int, last: int) -> tuple[int, ...]:
  """Slots of every segment: equal steps from `first` slots, filled at the start, up to `last`."""
  segments = min(MAX_SEGMENTS, max(1, -(-(last - first) // MIN_SEGMENT)))
  return tuple(first + -(-(last - first) * (i + 1) // segments) for i in range(segments))


def turns(slots: tuple[int, ...], needed: np.ndarray) -> jax.Array:
  """Steps at which segments begin, and their end: (segments + 1,) int32.

  Args:
    slots: from `cut`.
    needed: (steps,) int, slots that each step needs, increasing, at most the last segment's.
  """
  return jnp.asarray([0, *np.searchsorted(needed, slots, side='right')], jnp.int32)
