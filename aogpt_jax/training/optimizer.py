"""AdamW with the reference's schedule, decay mask, clipping and weight average (section 3)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from aogpt_jax.config import Config

NOT_DECAYED = ('bias', 'scale')  # the one-dimensional tensors of the reference


def learning_rate(config: Config) -> optax.Schedule:
  """Linear from 0 over the warm-up, cosine to min_learning_rate at decay_steps, then constant."""
  c = config.optimizer
  decay_length = config.decay_steps - c.warmup_steps
  if decay_length > 0:
    cosine = optax.cosine_decay_schedule(
        c.learning_rate, decay_length,
        alpha=c.min_learning_rate / c.learning_rate if c.learning_rate else 0.0)
  else:  # a run that ends within its warm-up
    cosine = optax.constant_schedule(c.min_learning_rate)
  if not c.warmup_steps:
    return cosine
  warmup = optax.linear_schedule(0.0, c.learning_rate, c.warmup_steps)
  return optax.join_schedules([warmup, cosine], [c.warmup_steps])


def decay_mask(params: Any) -> Any:
  """True for kernels and embeddings. By name: stacking gives biases and scales a second axis."""
  return jax.tree.map_with_path(lambda path, _: path[-1].key not in NOT_DECAYED, params)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """Scales gradients by min(1, max_norm / (norm + 1e-6)), as torch; optax has no epsilon."""
  def update(updates, state, params=None):
    del params
    factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
    return jax.tree.map(lambda u: u * factor, updates), state
  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """The whole update rule; gradients and moments are float32."""
  c = config.optimizer
  adamw = optax.adamw(learning_rate(config), b1=c.b1, b2=c.b2, eps=c.eps,
                      weight_decay=c.weight_decay, mask=decay_mask)
  if not c.clip_norm:
    return adamw
  return optax.chain(clip_by_global_norm(c.clip_norm), adamw)


def update_ema(ema: Any, params: Any, num_updates: jax.Array, decay: float) -> Any:
  """The average after update `num_updates` = 1, 2, …: decay ramps up as (1+k)/(10+k)."""
  k = num_updates.astype(jnp.float32)
  d = jnp.minimum(decay, (1 + k) / (10 + k))
  return jax.tree.map(lambda e, p: e - (1 - d) * (e - p), ema, params)
