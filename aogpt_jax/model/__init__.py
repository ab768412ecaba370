"""The models: `AOGPT(ModelConfig(...), rngs=nnx.Rngs(0))(tokens, orders) -> logits`."""

from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.model.decoder import AOGPT, Items, make_items
from aogpt_jax.model.encoder import MaskedEncoder

__all__ = ['AOGPT', 'Items', 'MaskedEncoder', 'ModelConfig', 'make', 'make_items']


def make(config: ModelConfig, *, rngs: nnx.Rngs) -> AOGPT | MaskedEncoder:
  """The model of config.architecture."""
  return (MaskedEncoder if config.architecture == 'encoder' else AOGPT)(config, rngs=rngs)
