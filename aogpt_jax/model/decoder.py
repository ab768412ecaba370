"""AO-GPT: a decoder over items (token, own position, target position).

Axes: B batch, n tokens of a sequence, T items, P = context_length, L layers, d width, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.model.attention import Past
from aogpt_jax.model.layers import Block, linear, modulate, normal, rms_norm

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
  """The layers taken out of the stack, and all modulation tables: made once a generation call.

  blocks: one module a layer. tables: (P, 6, d) a layer. final_table: (P, 2, d).
  """

  blocks: list[Block]
  tables: list[jax.Array]
  final_table: jax.Array


def make_items(generated: jax.Array, orders: jax.Array) -> Items:
  """Items of training, scoring and prefill: [NONE]→σ(1), x_σ(1)→σ(2), …, x_σ(n-1)→σ(n).

  Args:
    generated: (B, n) int32 tokens in generation order; the last one is not used.
    orders: (B, n) int32, row b a permutation, or its first n entries.
  """
  shift = lambda x, first: jnp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=first)
  return Items(shift(generated, 0), shift(orders, NONE_POSITION), orders)


class AOGPT(nnx.Module):
  """The AdaLN decoder of paper section 2.

  Layers are stored stacked: every parameter of `blocks` has a leading axis L.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    d, init = config.embed_dim, normal(config.init_std)
    embed = lambda rows, width: nnx.Embed(rows, width, embedding_init=init, dtype=jnp.float32,
                                          param_dtype=jnp.float32, rngs=rngs)
    self.config = config
    self.token_embedding = embed(config.vocab_size, d)
    self.position_embedding = embed(config.context_length + 1, d)  # row 0 is [NONE]'s
    self.target_embedding = embed(config.context_length, config.condition_dim)
    self.none_embedding = embed(1, d)
    self.blocks = nnx.vmap(lambda r: Block(config, r), in_axes=0, out_axes=0)(
        rngs.split(config.num_layers))
    self.final_norm = rms_norm(d, rngs)
    self.final_modulation = linear(config, config.condition_dim, (2, d), rngs=rngs)
    self.head = linear(config, d, config.vocab_size, rngs=rngs)
    self.dropout = nnx.Dropout(config.dropout_rate)

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
    if tokens.shape[1] > self.config.context_length:
      raise UserError(f'tokens of length {tokens.shape[1]}: the context_length of this model is '
                      f'{self.config.context_length}')
    items = make_items(jnp.take_along_axis(tokens, orders, axis=1), orders)
    embed_key, blocks_key = (None, None) if key is None else jax.random.split(key)
    x = self.dropout(self.embed(items), deterministic=key is None, rngs=embed_key)
    return self.finish(self._run_blocks(x, items, blocks_key), items.target, self.final_table())

  def _run_blocks(self, x: jax.Array, items: Items, key: jax.Array | None) -> jax.Array:
    graphdef, stacked = nnx.split(self.blocks)
    condition = self.target_embedding.embedding[...]

    def run(x, layer):
      state, layer_key = layer
      block = nnx.merge(graphdef, state)
      x, _ = block(x, block.table(condition), items.position, items.target, key=layer_key)
      return x, None

    num_layers = self.config.num_layers
    layer_keys = None if key is None else jax.random.split(key, num_layers)
    unroll = 1 if self.config.scan_layers else num_layers
    return jax.lax.scan(run, x, (stacked, layer_keys), unroll=unroll)[0]

  def embed(self, items: Items) -> jax.Array:
    """Sum of token (or [NONE]) and position embeddings, (B, T, d) float32."""
    is_none = (items.position == NONE_POSITION)[..., None]
    token = jnp.where(is_none, self.none_embedding.embedding[0], self.token_embedding(items.token))
    return token + self.position_embedding(items.position + 1)

  def final_table(self) -> jax.Array:
    """Modulation vectors of the final norm for every target position, (P, 2, d)."""
    return self.final_modulation(jax.nn.silu(self.target_embedding.embedding[...]))

  def finish(self, x: jax.Array, target: jax.Array, final_table: jax.Array) -> jax.Array:
    """The modulated final norm: (B, T, d) and (B, T) -> (B, T, d) float32."""
    shift, scale = jnp.moveaxis(final_table[target].astype(jnp.float32), 2, 0)
    return modulate(self.final_norm(x), shift, scale)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """The head: (..., d) -> (..., V) float32."""
    return self.head(hidden).astype(jnp.float32)

  def unstack(self) -> Unstacked:
    """Takes the layers out of the stack and computes their modulation tables."""
    graphdef, stacked = nnx.split(self.blocks)
    condition = self.target_embedding.embedding[...]
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
