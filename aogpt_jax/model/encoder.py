"""The encoder-only masked diffusion model that the paper compares with.

The same layers under full attention: an item is (token or [MASK], position, that same position as
target). Time-agnostic, as RADD and MDLM: the network sees the masked sequence and nothing else.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.model.layers import embedding
from aogpt_jax.model.stack import Stack
from aogpt_jax.sharding import take_rows


class MaskedEncoder(Stack):
  """p(x_i | the tokens that are not masked), for all positions i at once.

  The [MASK] id is V, outside the vocabulary: it has a row in the token table and none in the head.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    d = config.embed_dim
    self.token_embedding = embedding(config, config.vocab_size + 1, d, rngs=rngs)
    if config.position_encoding == 'learned':
      self.position_embedding = embedding(config, config.context_length, d, rngs=rngs)
    self.make_layers(config, rngs)
    self.make_head(config, rngs)

  def __call__(self, tokens: jax.Array, masked: jax.Array,
               key: jax.Array | None = None) -> jax.Array:
    """Logits of every position given the tokens that are not masked.

    Args:
      tokens: (B, n) int32, n <= context_length; ignored where masked.
      masked: (B, n) bool.
      key: dropout key; None: no dropout.

    Returns:
      logits (B, n, V) float32 in sequence order; only those of masked positions mean anything.

    Raises:
      UserError: if n exceeds the context.
    """
    return self.logits(self.hidden(tokens, masked, key))

  def hidden(self, tokens: jax.Array, masked: jax.Array,
             key: jax.Array | None = None) -> jax.Array:
    """As `__call__`, without the head: (B, n, d)."""
    self.check_length(tokens.shape[1])
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ids = jnp.where(masked, self.config.vocab_size, tokens)
    x = take_rows(self.token_embedding.embedding[...], ids, 'tensor')
    if self.config.position_encoding == 'learned':
      x = x + take_rows(self.position_embedding.embedding[...], position)
    return self.final_norm(self.run_blocks(x, position, position, None, key))
