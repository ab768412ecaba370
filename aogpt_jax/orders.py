"""Distributions over generation orders.

An order is a permutation of the positions 0..n-1: `orders[b, t]` is the position that row b
generates at step t. Everything "in generation order" is indexed by t.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from aogpt_jax import keys
from aogpt_jax.errors import UserError, nearest


class OrderDistribution(NamedTuple):
  """A named distribution; `row(key, n)` draws one order (n,) int32 and can be jitted."""

  name: str
  row: Callable[[jax.Array, int], jax.Array]

  def sample(self, key: jax.Array, batch_size: int, length: int,
             first_row: int | jax.Array = 0) -> jax.Array:
    """Draws one permutation a row.

    Row b depends on (key, first_row + b) alone, so that a batch cut into pieces gives the same
    orders as the whole.

    Args:
      key: typed PRNG key.
      batch_size: B.
      length: n in tokens.
      first_row: index of the first row within the global batch.

    Returns:
      orders (B, n) int32.
    """
    row_keys = keys.row_keys(key, first_row + jnp.arange(batch_size))
    return jax.vmap(lambda k: self.row(k, length))(row_keys)


def _uniform_row(key: jax.Array, length: int) -> jax.Array:
  return jax.random.permutation(key, length).astype(jnp.int32)


def _left_to_right_row(key: jax.Array, length: int) -> jax.Array:
  del key
  return jnp.arange(length, dtype=jnp.int32)


def _left_to_right():
  return _left_to_right_row


def _uniform():
  return _uniform_row


def _mixture(random_ratio: float = 0.9):
  def row(key, length):
    choice_key, order_key = jax.random.split(key)
    shuffled = jax.random.uniform(choice_key) < random_ratio
    return jnp.where(shuffled, _uniform_row(order_key, length), _left_to_right_row(key, length))
  return row


def _given(permutation: tuple[int, ...], length: int, what: str) -> jax.Array:
  if sorted(permutation) != list(range(length)):
    raise UserError(f'permutation={permutation!r}: must hold each of 0..{length - 1} once, '
                    f'the length of the {what} being {length}')
  return jnp.asarray(permutation, jnp.int32)


def _fixed(seed: int = 0, permutation: tuple[int, ...] = ()):
  def row(key, length):
    del key
    if permutation:
      return _given(permutation, length, 'sequence')
    return _uniform_row(keys.stream_key(seed, 'order'), length)
  return row


def _blockwise(block_size: int = 4, inner: str = 'fixed', seed: int = 0,
               permutation: tuple[int, ...] = ()):
  if inner not in ('fixed', 'random'):
    raise UserError(f'inner={inner!r}: no such inner order'
                    f'{nearest(inner, ("fixed", "random"))}')

  def row(key, length):
    if length % block_size:
      raise UserError(f'block_size={block_size}: must divide the sequence length {length}')
    starts = jnp.arange(0, length, block_size, dtype=jnp.int32)
    if inner == 'random':
      within = jax.vmap(lambda k: _uniform_row(k, block_size))(
          jax.random.split(key, length // block_size))
    elif permutation:
      within = _given(permutation, block_size, 'block')
    else:
      within = _uniform_row(keys.stream_key(seed, 'order'), block_size)
    return (starts[:, None] + within).reshape(length)
  return row


_MAKERS = {'left_to_right': _left_to_right, 'uniform': _uniform, 'mixture': _mixture,
           'fixed': _fixed, 'blockwise': _blockwise}


def make(name: str, **options) -> OrderDistribution:
  """Returns the distribution called `name`.

  * left_to_right: the identity (autoregressive model).
  * uniform: uniform over all n! orders (any-order model; its loss is the masked-diffusion ELBO).
  * mixture(random_ratio=0.9): uniform with that probability, else the identity (AO-GPT).
  * fixed(seed=0, permutation=()): one order for every row, drawn from the seed or given.
  * blockwise(block_size=4, inner='fixed', seed=0, permutation=()): blocks left to right (paper
    Figure 2a); inside, one fixed permutation (drawn or given) or a random one for each block.

  Raises:
    UserError: for an unknown name or option, or, when sampling, a length that does not fit.
  """
  if name not in _MAKERS:
    raise UserError(f'order {name!r}: no such distribution{nearest(name, _MAKERS)}')
  valid = inspect.signature(_MAKERS[name]).parameters
  for option in options:
    if option not in valid:
      raise UserError(f'order {name!r} has no option {option!r}{nearest(option, valid)}')
  return OrderDistribution(name, _MAKERS[name](**options))
