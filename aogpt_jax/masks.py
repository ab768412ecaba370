"""Random masks of masked diffusion, and what their losses weigh.

The bound on -log p(x) of a time-agnostic masked diffusion model is an integral over time t, in
which every token is masked by itself with probability λ(t), from λ(0) = 0 to λ(1) = 1:

    L(x) = ∫ λ'(t)/λ(t) E[ Σ_{i masked} -log p(x_i | the tokens not masked) ] dt

It does not depend on the schedule λ; with λ(t) = t it is the λ-denoising cross-entropy of RADD
(arXiv 2406.03736). It also equals the any-order loss averaged over all n! orders.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aogpt_jax import keys
from aogpt_jax.config import MASKINGS, check_choice


class Masks(NamedTuple):
  """One draw of the bound for each row of a batch.

  masked: (B, n) bool.
  weight: (B,) float32; weight · Σ_masked -log p is an unbiased estimate of L(x), in nats.
  """

  masked: jax.Array
  weight: jax.Array


def antithetic_times(key: jax.Array, rows: jax.Array, total: int) -> jax.Array:
  """One time in (0, 1] for each row: a common random shift of an even grid over `total` rows.

  Every time is uniform; together they cover (0, 1] evenly, which makes a batch's loss less noisy.

  Args:
    key: typed PRNG key, the same for every row of the batch.
    rows: (B,) int32, the rows' numbers in 0..total-1.
    total: rows of the global batch.

  Returns:
    (B,) float32.
  """
  shift = jax.random.uniform(key)
  return 1.0 - jnp.mod(shift + rows.astype(jnp.float32) / total, 1.0)


def _mask_row(masking: str, key: jax.Array, time: jax.Array, length: int) -> Masks:
  noise = jax.random.uniform(key, (length,))
  if masking == 'count':
    # Exactly k tokens, k uniform on 1..n: the bound is n · E_k mean_{masked} -log p.
    count = jnp.ceil(time * length)
    return Masks(jnp.argsort(jnp.argsort(noise)) < count, length / count)
  if masking == 'linear':
    ratio, weight = time, 1.0 / time
  else:  # 1 - cos(πt/2), written so that a small ratio keeps its digits
    ratio = 2 * jnp.sin(jnp.pi / 4 * time) ** 2
    weight = jnp.pi / 2 / jnp.tan(jnp.pi / 4 * time)
  return Masks(noise < ratio, weight)


def sample(masking: str, key: jax.Array, rows: jax.Array, total: int, length: int) -> Masks:
  """Draws masks for some rows of a global batch; row b depends on (key, rows[b], total) alone.

  Args:
    masking: 'linear' (λ = t), 'cosine' (λ = 1 - cos(πt/2)), or 'count' (exactly ⌈t·n⌉ tokens,
      the same expectation with the least noise).
    key: typed PRNG key.
    rows: (B,) int32, the rows' numbers in 0..total-1.
    total: rows of the global batch.
    length: n in tokens.

  Returns:
    Masks of (B, n) and (B,).

  Raises:
    UserError: for an unknown masking.
  """
  check_choice('masking', masking, MASKINGS)
  time_key, row_key = jax.random.split(key)
  times = antithetic_times(time_key, rows, total)
  return jax.vmap(lambda k, t: _mask_row(masking, k, t, length))(keys.row_keys(row_key, rows),
                                                                 times)
