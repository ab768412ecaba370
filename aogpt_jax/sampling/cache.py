"""The key/value cache of generation, which grows in a few segments of static length.

Every step reads all slots of its segment, filled or not, so segments keep that work near to what is
filled. Axes: B batch, T new items, S slots, H heads, K head width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax.config import ModelConfig

MAX_SEGMENTS = 4  # each is compiled apart
MIN_SEGMENT = 64  # slots

Layers = list[tuple[jax.Array, jax.Array]]  # keys and values of each layer


class Cache(NamedTuple):
  """Keys and values of past items.

  layers: (B, H, K, S) keys and values of each: with the slots last neither product of attention
    needs a transposed copy.
  valid: (B, S) bool, the slots that hold an item of the row; others hold padding or garbage.
  """

  layers: Layers
  valid: jax.Array


def empty_layers(config: ModelConfig, batch: int, slots: int) -> Layers:
  """Zeros for every layer, in config.dtype."""
  shape = (batch, config.num_heads, config.head_dim, slots)
  zeros = lambda: jnp.zeros(shape, jnp.dtype(config.dtype))
  return [(zeros(), zeros()) for _ in range(config.num_layers)]


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
  put = lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, slot, axis=-1)
  put_items = lambda old, x: put(old, jnp.moveaxis(x[:, first:last], 1, -1))
  return Cache(jax.tree.map(put_items, cache.layers, new), put(cache.valid, valid))


def after(slot: jax.Array, hidden: jax.Array) -> jax.Array:
  """`slot`, made to depend on what a step computed, (B, T, d), so that its writes follow its reads.

  Without it XLA may not order them, and copies the whole cache at every step.
  """
  return slot + jnp.isnan(hidden[0, 0, 0])


def grow(cache: Any, slots: int) -> Any:
  """A Cache, or Layers, with empty slots added up to `slots`."""
  return jax.tree.map(
      lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, slots - x.shape[-1])]), cache)


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
