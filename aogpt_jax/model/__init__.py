"""The decoder: `AOGPT(ModelConfig(...), rngs=nnx.Rngs(0))(tokens, orders) -> logits`."""

from aogpt_jax.config import ModelConfig
from aogpt_jax.model.decoder import AOGPT, Items, make_items

__all__ = ['AOGPT', 'Items', 'ModelConfig', 'make_items']
