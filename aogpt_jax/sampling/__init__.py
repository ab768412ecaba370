"""Generation in any order: schedules, the law of a draw, the decoder's and the encoder's loops."""

from aogpt_jax.sampling.logits import SamplingRule, draw, nucleus_mask, transform
from aogpt_jax.sampling.masked import ancestral
from aogpt_jax.sampling.parallel import decode_logits, generate
from aogpt_jax.sampling.schedules import reveal_counts

__all__ = ['SamplingRule', 'ancestral', 'decode_logits', 'draw', 'generate', 'nucleus_mask',
           'reveal_counts', 'transform']
