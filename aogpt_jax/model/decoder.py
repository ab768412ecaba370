"""AO-GPT: a decoder over items (token, own position, target position).

Axes: B batch, n tokens of a sequence, T items, P = context_length, d width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.model.attention import Past
from aogpt_jax.model.layers import Block, embedding, linear, modulate
from aogpt_jax.model.stack import Stack
from aogpt_jax.sharding import take_rows

NONE_POSITION = -1  # own position of the item before the first token, [NONE]


class Items(NamedTuple):
  """What the decoder reads; item t predicts the token at `target[t]`. All (B, T) int32.

  token: ids; ignored where position is NONE_POSITION.
  position: where the token stands in the sequence, or NONE_POSITION.
  target: the position that is generated next.
  """

  token: jax.Array
  position: jax.Array
  target: jax.Array


class Unstacked(NamedTuple):
  """The layers taken out of the stack, and all tables of targets: made once a generation call.

  blocks: one module a layer. tables: `Block.table` of each. final_table: (P, 2, d), adaln only.
  """

  blocks: list[Block]
  tables: list[jax.Array | None]
  final_table: jax.Array | None


def make_items(generated: jax.Array, orders: jax.Array) -> Items:
  """Items of training, scoring and prefill: [NONE]→σ(1), x_σ(1)→σ(2), …, x_σ(n-1)→σ(n).

  Args:
    generated: (B, n) int32 tokens in generation order; the last one is not used.
    orders: (B, n) int32, row b a permutation, or its first n entries.
  """
  shift = lambda x, first: jnp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=first)
  return Items(shift(generated, 0), shift(orders, NONE_POSITION), orders)


class AOGPT(Stack):
  """The decoder of paper section 2; AO-GPT, σ-GPT and a left-to-right GPT are configs of it."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    d, n = config.embed_dim, config.context_length
    self.token_embedding = embedding(config, config.vocab_size, d, rngs=rngs)
    self.position_embedding = embedding(config, n + 1, d, rngs=rngs)  # row 0 is [NONE]'s
    if config.target_injection in ('adaln', 'input', 'every_block'):
      width = config.condition_dim if config.target_injection == 'adaln' else d
      self.target_embedding = embedding(config, n, width, rngs=rngs)
    self.none_embedding = embedding(config, 1, d, rngs=rngs)
    self.make_layers(config, rngs)
    if config.target_injection == 'adaln':
      self.final_modulation = linear(config, config.condition_dim, (2, d), rngs=rngs)
    self.make_head(config, rngs)

  def __call__(self, tokens: jax.Array, orders: jax.Array,
               key: jax.Array | None = None) -> jax.Array:
    """Logits of every token given those generated before it.

    Args:
      tokens: (B, n) int32 in sequence order, n <= context_length.
      orders: (B, n) int32, row b a permutation of 0..n-1.
      key: dropout key; None: no dropout.

    Returns:
      logits (B, n, V) float32 in generation order: row t predicts tokens[b, orders[b, t]].

    Raises:
      UserError: if n exceeds the context or the shapes differ.
    """
    return self.logits(self.hidden(tokens, orders, key))

  def hidden(self, tokens: jax.Array, orders: jax.Array,
             key: jax.Array | None = None) -> jax.Array:
    """As `__call__`, without the head: (B, n, d) in generation order."""
    if tokens.shape != orders.shape:
      raise UserError(f'tokens {tokens.shape} and orders {orders.shape} must have one shape (B, n)')
    self.check_length(tokens.shape[1])
    return self.hidden_of(make_items(jnp.take_along_axis(tokens, orders, axis=1), orders), key)

  def hidden_of(self, items: Items, key: jax.Array | None = None) -> jax.Array:
    """As `hidden`, of any items, causal among themselves: (B, T, d)."""
    x = self.run_blocks(self.embed(items), items.position, items.target, self._condition(), key)
    return self.finish(x, items.target, self.final_table())

  def _condition(self) -> jax.Array | None:
    """The target table (P, c) that all blocks share, if there is one."""
    has_table = self.config.target_injection in ('adaln', 'input', 'every_block')
    return self.target_embedding.embedding[...] if has_table else None

  def embed(self, items: Items) -> jax.Array:
    """Sum of token (or [NONE]), position and, if injected here, target: (B, T, d) float32."""
    is_none = (items.position == NONE_POSITION)[..., None]
    none = self.none_embedding.embedding[0]
    token = jnp.where(is_none, none, take_rows(
        self.token_embedding.embedding[...], items.token, 'tensor'))
    x = token + take_rows(self.position_embedding.embedding[...], items.position + 1)
    if self.config.target_injection != 'input':
      return x
    return x + take_rows(self._condition(), items.target)

  def final_table(self) -> jax.Array | None:
    """adaln: modulation vectors of the final norm for every target position, (P, 2, d)."""
    if self.config.target_injection != 'adaln':
      return None
    return self.final_modulation(jax.nn.silu(self._condition()))

  def finish(self, x: jax.Array, target: jax.Array, final_table: jax.Array | None) -> jax.Array:
    """The final norm, modulated by `final_table`: (B, T, d) and (B, T) -> (B, T, d) float32."""
    x = self.final_norm(x)
    if final_table is None:
      return x
    rows = take_rows(final_table, target).astype(jnp.float32)
    return modulate(x, *jnp.moveaxis(rows, 2, 0))

  def unstack(self) -> Unstacked:
    """Takes the layers out of the stack and computes their tables of targets."""
    graphdef, stacked = nnx.split(self.blocks)
    condition = self._condition()
    blocks = [nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], stacked))
              for i in range(self.config.num_layers)]
    return Unstacked(blocks, [block.table(condition) for block in blocks], self.final_table())

  def extend(self, items: Items, layers: Unstacked, past: list[Past | None],
             ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Runs new items against a cache: prefill and generation.

    Args:
      items: the new items, (B, T) each.
      layers: from `unstack()`.
      past: one a layer; None: the items are causal among themselves (prefill).

    Returns:
      hidden (B, T, d), and for each layer the new keys and values (B, T, H, K).
    """
    x, new = self.embed(items), []
    for block, table, layer_past in zip(layers.blocks, layers.tables, past, strict=True):
      x, key_value = block(x, table, items.position, items.target, layer_past)
      new.append(key_value)
    return self.finish(x, items.target, layers.final_table), new
