"""The layers and the block that every model of this project is built from.

Axes: B batch, T items, P target positions, d width, c condition width, H heads, K head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.model import attention


def normal(std: float) -> jax.nn.initializers.Initializer:
  """Truncated normal, cut at 3 std, variance not corrected (reference initialisation)."""
  return jax.nn.initializers.truncated_normal(std, lower=-3.0, upper=3.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, kernel: jax.Array, num_contracted: int) -> jax.Array:
  """Contracts the last axes of x (B, T, …) with the first of the kernel.

  The gradient of the kernel is formed as x^T g. JAX's own rule forms (g^T x)^T, and XLA's CPU
  backend then recomputes the elementwise work before g while it transposes it, which makes an MLP
  1.5 to 2 times as slow.
  """
  lhs = tuple(range(x.ndim - num_contracted, x.ndim))
  return jax.lax.dot_general(x, kernel, ((lhs, tuple(range(num_contracted))), ((), ())))


def _matmul_forward(x, kernel, num_contracted):
  return matmul(x, kernel, num_contracted), (x, kernel)


def _matmul_backward(num_contracted, saved, g):
  x, kernel = saved
  rows = tuple(range(x.ndim - num_contracted))
  outputs = g.ndim - len(rows)
  trailing = lambda ndim: tuple(range(ndim - outputs, ndim))
  dx = jax.lax.dot_general(g, kernel, ((trailing(g.ndim), trailing(kernel.ndim)), ((), ())))
  return dx, jax.lax.dot_general(x, g, ((rows, rows), ((), ())))


matmul.defvjp(_matmul_forward, _matmul_backward)


def _dot_general(x, kernel, dimension_numbers, **unused):
  return matmul(x, kernel, len(dimension_numbers[0][1]))


def linear(config: ModelConfig, in_features: int | tuple[int, ...],
           out_features: int | tuple[int, ...], *, rngs: nnx.Rngs, bias: bool = True,
           residual: bool = False,
           bias_init: jax.nn.initializers.Initializer = nnx.initializers.zeros,
           ) -> nnx.LinearGeneral:
  """A linear layer over the last axes; weights float32, matmul inputs in config.dtype.

  `residual` marks the two projections that write to the residual stream: their std is divided by
  sqrt(2 * num_layers), as in the reference.
  """
  std = config.init_std / (2 * config.num_layers) ** 0.5 if residual else config.init_std
  axis = tuple(range(-len(in_features), 0)) if isinstance(in_features, tuple) else -1
  return nnx.LinearGeneral(
      in_features, out_features, axis=axis, use_bias=bias, kernel_init=normal(std),
      bias_init=bias_init, dtype=jnp.dtype(config.dtype), param_dtype=jnp.float32,
      dot_general=_dot_general, rngs=rngs)


def rms_norm(features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
  """RMSNorm with learned scale, computed and returned in float32."""
  return nnx.RMSNorm(features, epsilon=1e-5, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
  """AdaLN: x * (1 + scale) + shift, all (B, T, d)."""
  return x * (1 + scale) + shift


class Attention(nnx.Module):
  """Multi-head attention with qk-norm; target_rotary turns queries by target, keys by position."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    heads = (config.num_heads, config.head_dim)
    self.config = config
    self.qkv = linear(config, config.embed_dim, (3, *heads), bias=config.use_bias, rngs=rngs)
    self.q_norm = rms_norm(config.head_dim, rngs)
    self.k_norm = rms_norm(config.head_dim, rngs)
    self.out = linear(config, heads, config.embed_dim, bias=config.use_bias, residual=True,
                      rngs=rngs)

  def __call__(self, x: jax.Array, position: jax.Array, target: jax.Array,
               past: attention.Past | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """x (B, T, d) -> (B, T, d) and the keys and values of these items, (B, T, H, K) each."""
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    qkv = self.qkv(x)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    query, key = self.q_norm(query), self.k_norm(key)
    if config.position_encoding == 'target_rotary':
      query = attention.rotate(query, target, config.rotary_base)
      key = attention.rotate(key, position, config.rotary_base)
    query, key = query.astype(dtype), key.astype(dtype)
    return self.out(attention.attend(query, key, value, past)), (key, value)


def _gate_bias(value: float) -> jax.nn.initializers.Initializer:
  """Bias (6·d,) of the modulation: zeros, but `value` for the two gates."""
  is_gate = jnp.array([0, 0, 1, 0, 0, 1])
  return lambda key, shape, dtype, **kwargs: jnp.repeat(
      value * is_gate, shape[0] // 6).astype(dtype)


class Block(nnx.Module):
  """Attention and MLP, each behind a norm that the target position modulates (AdaLN)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    d = config.embed_dim
    self.norm1 = rms_norm(d, rngs)
    self.attention = Attention(config, rngs)
    self.norm2 = rms_norm(d, rngs)
    self.up = linear(config, d, 4 * d, bias=config.use_bias, rngs=rngs)
    self.down = linear(config, 4 * d, d, bias=config.use_bias, residual=True, rngs=rngs)
    self.modulation = linear(config, config.condition_dim, (6, d),
                             bias_init=_gate_bias(config.gate_init), rngs=rngs)
    self.dropout = nnx.Dropout(config.dropout_rate)

  def table(self, condition: jax.Array) -> jax.Array:
    """Modulation vectors of every target position: (P, c) -> (P, 6, d).

    They depend on the target alone, so a table with a gather replaces a linear layer over items.
    """
    return self.modulation(jax.nn.silu(condition))

  def __call__(self, x: jax.Array, table: jax.Array, position: jax.Array, target: jax.Array,
               past: attention.Past | None = None, key: jax.Array | None = None,
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs the block over items.

    Args:
      x: (B, T, d) float32 residual stream.
      table: (P, 6, d) from `table`.
      position: (B, T) int32 own positions, -1 for [NONE].
      target: (B, T) int32 positions to be generated.
      past: None: causal over the items given.
      key: dropout key; None: no dropout.

    Returns:
      x (B, T, d) and this layer's keys and values, (B, T, H, K) each.
    """
    shift1, scale1, gate1, shift2, scale2, gate2 = jnp.moveaxis(
        table[target].astype(jnp.float32), 2, 0)
    key1, key2 = (None, None) if key is None else jax.random.split(key)
    drop = lambda y, k: self.dropout(y, deterministic=k is None, rngs=k)
    y, key_value = self.attention(modulate(self.norm1(x), shift1, scale1), position, target, past)
    x = x + gate1 * drop(y, key1)
    y = self.up(modulate(self.norm2(x), shift2, scale2))
    y = self.down(jax.nn.gelu(y, approximate=False))
    return x + gate2 * drop(y, key2), key_value
