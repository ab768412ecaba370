"""The layers and the block that every model of this project is built from.

Axes: B batch, T items, P target positions, d width, c condition width, H heads, K head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from aogpt_jax.config import ModelConfig
from aogpt_jax.model import attention
from aogpt_jax.sharding import take_rows

LINEAR = 'linear'  # name of what the linear layers return


def initializer(config: ModelConfig, std: float) -> jax.nn.initializers.Initializer:
  """Normal, or truncated at 3 std with the variance not corrected (as AO-GPT's reference)."""
  if config.initializer == 'normal':
    return jax.nn.initializers.normal(std)
  return jax.nn.initializers.truncated_normal(std, lower=-3.0, upper=3.0)


def embedding(config: ModelConfig, rows: int, width: int, *, rngs: nnx.Rngs) -> nnx.Embed:
  """A table (rows, width) float32."""
  return nnx.Embed(rows, width, embedding_init=initializer(config, config.init_std),
                   dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)


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
  # The name is for config.remat: a policy does not see the product inside a custom gradient.
  return checkpoint_name(matmul(x, kernel, len(dimension_numbers[0][1])), LINEAR)


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
      in_features, out_features, axis=axis, use_bias=bias,
      kernel_init=initializer(config, std), bias_init=bias_init,
      dtype=jnp.dtype(config.dtype), param_dtype=jnp.float32,
      dot_general=_dot_general, rngs=rngs)


class RMSNorm(nnx.RMSNorm):
  """x / sqrt(mean x² + eps) · scale over the last axis, in float32.

  As nnx computes it, but in another order: there (1 / sqrt) · scale comes first, which has the size
  of x and is kept for the backward pass.
  """

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
    return x * inverse * self.scale[...]


def make_norm(config: ModelConfig, features: int, *, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
  """The norm of config.norm with learned scale, eps 1e-5, computed and returned in float32."""
  options = dict(epsilon=1e-5, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
  if config.norm == 'rmsnorm':
    return RMSNorm(features, **options)
  # The variance as mean (x - mean)^2: E x^2 - mean^2 loses digits.
  return nnx.LayerNorm(features, use_bias=config.use_bias, use_fast_variance=False, **options)


def gelu(x: jax.Array) -> jax.Array:
  """Exact GELU, x · Φ(x): by erf, as PyTorch; jax.nn.gelu takes erfc, which costs twice as much."""
  return 0.5 * x * (1 + jax.lax.erf(x * 0.5 ** 0.5))


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
  """AdaLN: x * (1 + scale) + shift, all (B, T, d)."""
  return x * (1 + scale) + shift


class Attention(nnx.Module):
  """Multi-head attention; a decoder's is causal over items, an encoder's sees every item."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    heads = (config.num_heads, config.head_dim)
    self.config = config
    self.qkv = linear(config, config.embed_dim, (3, *heads), bias=config.use_bias, rngs=rngs)
    if config.qk_norm:
      self.q_norm = make_norm(config, config.head_dim, rngs=rngs)
      self.k_norm = make_norm(config, config.head_dim, rngs=rngs)
    self.out = linear(config, heads, config.embed_dim, bias=config.use_bias, residual=True,
                      rngs=rngs)

  def __call__(self, x: jax.Array, position: jax.Array, target: jax.Array,
               past: attention.Past | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """x (B, T, d) -> (B, T, d) and the keys and values of these items, (B, T, H, K) each."""
    config, dtype = self.config, jnp.dtype(self.config.dtype)
    qkv = self.qkv(x)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    if config.qk_norm:
      query, key = self.q_norm(query), self.k_norm(key)
    if config.position_encoding != 'learned':  # an encoder's targets are its positions
      query = attention.rotate(query, target, config.rotary_base)
      key = attention.rotate(key, position, config.rotary_base)
    query, key = query.astype(dtype), key.astype(dtype)
    causal = config.architecture == 'decoder'
    y = attention.attend(query, key, value, past, causal, config.attention)
    return self.out(y), (key, value)


def _gate_bias(value: float) -> jax.nn.initializers.Initializer:
  """Bias (6·d,) of the modulation: zeros, but `value` for the two gates."""
  is_gate = jnp.array([0, 0, 1, 0, 0, 1])
  return lambda key, shape, dtype, **kwargs: jnp.repeat(
      value * is_gate, shape[0] // 6).astype(dtype)


# (shift, scale, gate) of attention and of MLP for a block that is not modulated.
PLAIN = (0.0, 0.0, 1.0) * 2


class Block(nnx.Module):
  """Attention and MLP, each behind a norm, in a residual stream.

  config.target_injection says how the target position enters (paper Figure 5):
    adaln: (b) it shifts, scales and gates both branches, through a linear layer of this block.
    input: (a) not here: its embedding was added to the input of the first block (σ-GPT).
    every_block: (c) one embedding, added to the input of every block.
    every_block_distinct: (d) an embedding of this block's own, added to its input.
    none: not at all: a left-to-right GPT, or an encoder.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    d = config.embed_dim
    self.injection = config.target_injection
    self.norm1 = make_norm(config, d, rngs=rngs)
    self.attention = Attention(config, rngs)
    self.norm2 = make_norm(config, d, rngs=rngs)
    self.up = linear(config, d, 4 * d, bias=config.use_bias, rngs=rngs)
    self.down = linear(config, 4 * d, d, bias=config.use_bias, residual=True, rngs=rngs)
    if self.injection == 'adaln':
      self.modulation = linear(config, config.condition_dim, (6, d),
                               bias_init=_gate_bias(config.gate_init), rngs=rngs)
    if self.injection == 'every_block_distinct':
      self.target_embedding = embedding(config, config.context_length, d, rngs=rngs)
    self.dropout = nnx.Dropout(config.dropout_rate)

  def table(self, condition: jax.Array | None) -> jax.Array | None:
    """What this block is told of every target position: one row each.

    They depend on the target alone, so a table with a gather replaces a linear layer over items.

    Args:
      condition: (P, c) the model's target embedding; (P, d) if every_block.

    Returns:
      adaln: (P, 6, d); every_block and every_block_distinct: (P, d); else None.
    """
    if self.injection == 'adaln':
      return self.modulation(jax.nn.silu(condition))
    if self.injection == 'every_block_distinct':
      return self.target_embedding.embedding[...]
    return condition if self.injection == 'every_block' else None

  def _inject(self, x, table, target):
    """Returns x with what is added to it, and (shift, scale, gate) of both branches."""
    if table is None:
      return x, PLAIN
    take = lambda table: take_rows(table, target).astype(jnp.float32)
    if self.injection == 'adaln':  # one by one: rows of all six would be cut apart by a copy
      return x, [take(table[:, i]) for i in range(6)]
    return x + take(table), PLAIN

  def __call__(self, x: jax.Array, table: jax.Array | None, position: jax.Array, target: jax.Array,
               past: attention.Past | None = None, key: jax.Array | None = None,
               ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs the block over items.

    Args:
      x: (B, T, d) float32 residual stream.
      table: from `table`.
      position: (B, T) int32 own positions, -1 for [NONE].
      target: (B, T) int32 positions to be generated.
      past: None: attention over the items given.
      key: dropout key; None: no dropout.

    Returns:
      x (B, T, d) and this layer's keys and values, (B, T, H, K) each.
    """
    x, (shift1, scale1, gate1, shift2, scale2, gate2) = self._inject(x, table, target)
    key1, key2 = (None, None) if key is None else jax.random.split(key)
    drop = lambda y, k: self.dropout(y, deterministic=k is None, rngs=k)
    y, key_value = self.attention(modulate(self.norm1(x), shift1, scale1), position, target, past)
    x = x + gate1 * drop(y, key1)
    y = self.up(modulate(self.norm2(x), shift2, scale2))
    y = self.down(gelu(y))
    return x + gate2 * drop(y, key2), key_value
