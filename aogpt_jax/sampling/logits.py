"""From logits to tokens: temperature, nucleus, and draws with high-precision noise; float32."""

import functools
from collections.abc import Callable
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
GROUP = 128  # ids that are drawn from together


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
  as_float = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
  ids = jnp.arange(probs.shape[-1])
  over = lambda kept: jnp.where(kept, probs, 0).sum(axis=-1, keepdims=True) > top_p
  # No sort: as integers, the bits of floats that are not negative are in the order of the floats.
  top = jax.lax.bitcast_convert_type(probs.max(axis=-1, keepdims=True), jnp.int32)
  crossing = _last(lambda bits: over(probs >= as_float(bits)), jnp.full_like(top, -1), top + 1)
  above, tied = probs >= as_float(crossing + 1), probs == as_float(crossing)
  # Of the ids (mostly one) whose probability is that at which the mass crosses top_p, some may fit.
  first = jnp.where(tied, ids, ids.size).min(axis=-1, keepdims=True)
  last = jnp.where(tied, ids, -1).max(axis=-1, keepdims=True)
  end = _last(lambda end: ~over(above | tied & (ids < end)), first + (crossing == top), last + 1)
  return above | tied & (ids < end)


def _last(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
  """The last of low .. high - 1 that `holds`; low is taken to and is not asked.

  Args:
    holds: (...) int32 -> (...) bool, true up to some number and false from there on.
    low, high: (...) int32.

  Returns:
    (...) int32.
  """
  def halve(bounds):
    low, high = bounds
    middle = low + (high - low) // 2
    held = holds(middle)
    return jnp.where(held, middle, low), jnp.where(held, high, middle)
  return jax.lax.while_loop(lambda bounds: (bounds[1] - bounds[0] > 1).any(), halve, (low, high))[0]


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

  The largest of l + noise over a group of ids is distributed as logsumexp(l) + noise: the group is
  drawn first and the id in it next, exactly, with 500 values of noise for 50,000 ids. Gumbel noise
  in float32 with the long tail ('high'): 32-bit uniforms cut it off at about 16, which acts like a
  lower temperature (arXiv 2409.02908).
  """
  size = min(logits.shape[-1], GROUP)
  padding = [(0, 0)] * (logits.ndim - 1) + [(0, -logits.shape[-1] % size)]
  groups = jnp.pad(logits.astype(jnp.float32), padding, constant_values=-jnp.inf)
  groups = groups.reshape(*logits.shape[:-1], -1, size)
  group_key, id_key = jax.random.split(key)
  draw = lambda key, logits: jnp.argmax(logits + _noise(key, logits), axis=-1).astype(jnp.int32)
  group = draw(group_key, jax.nn.logsumexp(groups, axis=-1))
  members = jnp.take_along_axis(groups, group[..., None, None], axis=-2)[..., 0, :]
  return group * size + draw(id_key, members)


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
