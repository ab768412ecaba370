"""From logits to tokens: temperature, nucleus, and draws with high-precision noise; float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aogpt_jax.config import check


class SamplingRule(NamedTuple):
  """The law that tokens are drawn from, given logits; hashable, static under jit.

  Applied in this order: num_ids (ids from there on, the padding of the vocabulary, are never drawn;
  0 allows every id), temperature (0 is greedy), top_k (that many most probable ids; 0: all), top_p
  (nucleus mass; 1: all), min_p (ids at least that share of the most probable one; 0: all).
  final_temperature: of the last step, reached linearly from `temperature`; -1: constant.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  num_ids: int = 0
  top_k: int = 0
  min_p: float = 0.0
  final_temperature: float = -1.0

  def validate(self) -> 'SamplingRule':
    """Returns itself; raises UserError for an impossible value."""
    check(0 <= self.temperature < float('inf'), 'temperature', self.temperature,
          'must be finite and at least 0 (greedy)')
    final = self.final_temperature
    check(0 <= final < float('inf') or final == -1, 'final_temperature', final,
          'must be finite and at least 0 (greedy), or -1 (constant)')
    check(0 <= self.top_p <= 1, 'top_p', self.top_p, 'must be in [0, 1]')
    check(0 <= self.min_p <= 1, 'min_p', self.min_p, 'must be in [0, 1]')
    check(self.num_ids >= 0, 'num_ids', self.num_ids, 'must be at least 0 (every id)')
    check(self.top_k >= 0, 'top_k', self.top_k, 'must be at least 0 (every id)')
    return self

  @property
  def annealed(self) -> bool:
    return self.final_temperature not in (-1, self.temperature)

  def temperature_at(self, step: jax.Array, num_steps: jax.Array) -> jax.Array | None:
    """Temperature of a step, for `transform` of logits (B, k, V); None if constant.

    Args:
      step: () int32.
      num_steps: (B,) int32, how many steps each row takes.

    Returns:
      (B, 1, 1) float32.
    """
    if not self.annealed:
      return None
    share = jnp.clip(step / jnp.maximum(num_steps - 1, 1), 0, 1)[:, None, None]
    return self.temperature + (self.final_temperature - self.temperature) * share


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


def transform(logits: jax.Array, rule: SamplingRule,
              temperature: jax.Array | None = None) -> jax.Array:
  """Logits of the law of `rule`: (..., V) -> (..., V) float32, -inf where never drawn.

  A temperature of 0 leaves the most probable token alone (the first of several).

  Args:
    logits: (..., V).
    rule: what to apply.
    temperature: float32, that of the step if the rule is annealed; None: rule.temperature.
  """
  logits = logits.astype(jnp.float32)
  ids = jnp.arange(logits.shape[-1])
  if rule.num_ids:
    logits = jnp.where(ids < rule.num_ids, logits, -jnp.inf)
  if temperature is None and rule.temperature == 0:
    return jnp.where(ids == logits.argmax(axis=-1, keepdims=True), 0.0, -jnp.inf)
  if temperature is not None or rule.temperature != 1:
    divisor = rule.temperature if temperature is None else jnp.maximum(temperature, 1e-30)
    # Relative to the largest: a small temperature must end in greedy, not in inf.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / divisor
  if 0 < rule.top_k < logits.shape[-1]:
    kth = jax.lax.top_k(logits, rule.top_k)[0][..., -1:]
    logits = jnp.where(logits >= kth, logits, -jnp.inf)
  if rule.top_p < 1:
    kept = nucleus_mask(jax.nn.softmax(logits, axis=-1), rule.top_p)
    logits = jnp.where(kept, logits, -jnp.inf)
  if rule.min_p > 0:
    floor = logits.max(axis=-1, keepdims=True) + jnp.log(rule.min_p)
    logits = jnp.where(logits >= floor, logits, -jnp.inf)
  return logits


def token_details(logits: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """What a model thought of tokens, before any rule.

  Args:
    logits: (..., V).
    ids: (...) int32.

  Returns:
    Their log-probabilities in nats (...) float32, and ranks (...) int32: how many ids have a larger
    logit.
  """
  logits = logits.astype(jnp.float32)
  picked = jnp.take_along_axis(logits, ids[..., None], axis=-1)
  log_prob = picked[..., 0] - jax.nn.logsumexp(logits, axis=-1)
  return log_prob, (logits > picked).sum(axis=-1, dtype=jnp.int32)


def sample_categorical(key: jax.Array, logits: jax.Array) -> jax.Array:
  """Draws ids from softmax(logits): key (), logits (..., V) -> (...) int32.

  Gumbel noise in float32 with the long tail ('high'): 32-bit uniforms cut it off at about 16, which
  acts like a lower temperature (arXiv 2409.02908).
  """
  logits = logits.astype(jnp.float32)
  return jnp.argmax(logits + _noise(key, logits), axis=-1).astype(jnp.int32)


def gumbel_softmax(key: jax.Array, logits: jax.Array, temperature: float = 1.0) -> jax.Array:
  """A draw from softmax(logits) that gradients pass through (straight-through estimator).

  Args:
    key: typed PRNG key.
    logits: (..., V).
    temperature: of the relaxation whose gradient is taken, above 0.

  Returns:
    (..., V) float32, one-hot at the drawn id; its gradient is that of the softmax of
    (logits + noise) / temperature (arXiv 1611.01144).
  """
  noisy = logits.astype(jnp.float32) + _noise(key, logits)
  soft = jax.nn.softmax(noisy / temperature, axis=-1)
  hard = jax.nn.one_hot(noisy.argmax(axis=-1), logits.shape[-1])
  return soft + jax.lax.stop_gradient(hard - soft)


def _noise(key: jax.Array, logits: jax.Array) -> jax.Array:
  return jax.random.gumbel(key, logits.shape, jnp.float32, mode='high')
