"""From logits to tokens: temperature, nucleus, and draws with high-precision noise; float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aogpt_jax.config import check


class SamplingRule(NamedTuple):
  """The law that tokens are drawn from, given logits; hashable, static under jit.

  temperature: 0 is greedy. top_p: nucleus mass, 1 keeps all. num_ids: ids from here on (the padding
  of the vocabulary) are never drawn; 0 allows every id.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  num_ids: int = 0

  def validate(self) -> 'SamplingRule':
    """Returns itself; raises UserError for an impossible value."""
    check(0 <= self.temperature < float('inf'), 'temperature', self.temperature,
          'must be finite and at least 0 (greedy)')
    check(0 <= self.top_p <= 1, 'top_p', self.top_p, 'must be in [0, 1]')
    check(self.num_ids >= 0, 'num_ids', self.num_ids, 'must be at least 0 (every id)')
    return self


DEFAULT_RULE = SamplingRule()


def nucleus_mask(probs: jax.Array, top_p: float) -> jax.Array:
  """Marks the tokens of the nucleus, as the reference does.

  Tokens are sorted by descending probability (ties by id); those whose cumulative probability,
  their own included, exceeds top_p are dropped, except the most probable one.

  Args:
    probs: (..., V) float32.
    top_p: in [0, 1].

  Returns:
    (..., V) bool.
  """
  ranking = jnp.argsort(-probs, axis=-1, stable=True)
  cumulative = jnp.cumsum(jnp.take_along_axis(probs, ranking, axis=-1), axis=-1)
  kept = (cumulative <= top_p).at[..., 0].set(True)
  return jnp.take_along_axis(kept, jnp.argsort(ranking, axis=-1), axis=-1)


def transform(logits: jax.Array, rule: SamplingRule) -> jax.Array:
  """Logits of the law of `rule`: (..., V) -> (..., V) float32, -inf where never drawn.

  A temperature of 0 leaves the most probable token alone (the first of several).
  """
  logits = logits.astype(jnp.float32)
  ids = jnp.arange(logits.shape[-1])
  if rule.num_ids:
    logits = jnp.where(ids < rule.num_ids, logits, -jnp.inf)
  if rule.temperature == 0:
    return jnp.where(ids == logits.argmax(axis=-1, keepdims=True), 0.0, -jnp.inf)
  if rule.temperature != 1:
    # Relative to the largest: a small temperature must end in greedy, not in inf.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / rule.temperature
  if rule.top_p < 1:
    kept = nucleus_mask(jax.nn.softmax(logits, axis=-1), rule.top_p)
    logits = jnp.where(kept, logits, -jnp.inf)
  return logits


def draw(key: jax.Array, logits: jax.Array) -> jax.Array:
  """Draws one id from softmax(logits): key (), logits (V,) -> () int32.

  Gumbel noise with the long tail ('high'): 32-bit uniforms cut it off at about 16, which acts like
  a lower temperature (arXiv 2409.02908).
  """
  noise = jax.random.gumbel(key, logits.shape, jnp.float32, mode='high')
  return jnp.argmax(logits + noise).astype(jnp.int32)
