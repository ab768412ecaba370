"""Every random number of a run, on one page.

A key is a function of (seed, stream, step, row): nothing random is ever saved, so a run does not
depend on how it is cut into hosts, devices or restarts. `row` is the index of an example within
the global batch of its step (micro-batches number their rows on), or of a text within a call.
"""

import jax

STREAMS = ('init', 'order', 'dropout', 'eval', 'sample')  # never reorder: the index is the stream


def stream_key(seed: int | jax.Array, stream: str, *folds: int | jax.Array) -> jax.Array:
  """Returns the typed PRNG key of `stream`, with each of `folds` (a step, a draw, …) folded in.

  Args:
    seed: the run's seed.
    stream: one of STREAMS; a name that is not raises ValueError.
    *folds: non-negative integers, scalars.
  """
  key = jax.random.fold_in(jax.random.key(seed), STREAMS.index(stream))
  for value in folds:
    key = jax.random.fold_in(key, value)
  return key


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
  """Returns one key a row; rows (B,) int32 -> keys (B,)."""
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
