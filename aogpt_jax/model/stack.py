"""What decoder and encoder share: the token table, the layers, the final norm and the head.

Axes: B batch, T items, P = context_length, L layers, d width, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.model.layers import LINEAR, Block, linear, make_norm, matmul
from aogpt_jax.sharding import constrain_rows

# What of a layer is kept for its backward pass, by config.remat.
POLICIES = {
    'dots': jax.checkpoint_policies.save_only_these_names(LINEAR),
    'full': jax.checkpoint_policies.nothing_saveable,
}


class Stack(nnx.Module):
  """L blocks between tables, which a model makes itself, and a head of V ids.

  Layers are stored stacked: every parameter of `blocks` has a leading axis L. A model makes its
  parts in the order in which items pass them; another order would change the initial weights of a
  seed.
  """

  token_embedding: nnx.Embed

  def make_layers(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
    """Adds the blocks and the final norm."""
    self.config = config
    self.blocks = nnx.vmap(lambda r: Block(config, r), in_axes=0, out_axes=0)(
        rngs.split(config.num_layers))
    self.final_norm = make_norm(config, config.embed_dim, rngs=rngs)
    self.dropout = nnx.Dropout(config.dropout_rate)

  def make_head(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
    """Adds the head, unless it is the token embedding."""
    if not config.tie_embeddings:
      self.head = linear(config, config.embed_dim, config.vocab_size, bias=config.head_bias,
                         rngs=rngs)

  def check_length(self, length: int) -> None:
    """Raises UserError if a sequence of `length` tokens exceeds the context."""
    if length > self.config.context_length:
      raise UserError(f'tokens of length {length}: the context_length of this model is '
                      f'{self.config.context_length}')

  def run_blocks(self, x: jax.Array, position: jax.Array, target: jax.Array,
                 condition: jax.Array | None, key: jax.Array | None) -> jax.Array:
    """All layers over items without a cache: dropout, then the blocks.

    Args:
      x: (B, T, d) float32 embedded items.
      position, target: (B, T) int32.
      condition: (P, c) float32 rows of the target table, see `Block.table`; None: no target.
      key: dropout key; None: no dropout.

    Returns:
      (B, T, d) float32.
    """
    graphdef, stacked = nnx.split(self.blocks)
    embed_key, blocks_key = (None, None) if key is None else jax.random.split(key)
    x = constrain_rows(x)
    x = self.dropout(x, deterministic=key is None, rngs=embed_key)

    def run(x, layer):
      state, layer_key = layer
      block = nnx.merge(graphdef, state)
      x, _ = block(x, block.table(condition), position, target, key=layer_key)
      return constrain_rows(x), None

    if self.config.remat != 'none':
      # In a loop XLA cannot merge the second computation with the first; written out, it would.
      run = jax.checkpoint(run, policy=POLICIES[self.config.remat],
                           prevent_cse=not self.config.scan_layers)
    num_layers = self.config.num_layers
    layer_keys = None if key is None else jax.random.split(blocks_key, num_layers)
    unroll = 1 if self.config.scan_layers else num_layers
    return jax.lax.scan(run, x, (stacked, layer_keys), unroll=unroll)[0]

  def logits(self, hidden: jax.Array) -> jax.Array:
    """The head: (..., d) -> (..., V) float32."""
    if not self.config.tie_embeddings:
      return self.head(hidden).astype(jnp.float32)
    dtype = jnp.dtype(self.config.dtype)
    kernel = self.token_embedding.embedding[:self.config.vocab_size].T
    return matmul(hidden.astype(dtype), kernel.astype(dtype), 1).astype(jnp.float32)
