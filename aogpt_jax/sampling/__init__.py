"""Generation in any order: schedules, the law of a draw, the decoder's and the encoder's loops."""

from aogpt_jax.sampling.adaptive import adaptive
from aogpt_jax.sampling.logits import (
  SamplingRule,
  gumbel_softmax,
  nucleus_mask,
  sample_categorical,
  token_details,
  transform,
)
from aogpt_jax.sampling.masked import ancestral
from aogpt_jax.sampling.parallel import Generation, decode_logits, generate, generate_record
from aogpt_jax.sampling.rejection import token_rejection
from aogpt_jax.sampling.schedules import reveal_counts
from aogpt_jax.sampling.speculative import Speculation, speculative

__all__ = ['Generation', 'SamplingRule', 'Speculation', 'adaptive', 'ancestral', 'decode_logits',
           'generate', 'generate_record', 'gumbel_softmax', 'nucleus_mask', 'reveal_counts',
           'sample_categorical', 'speculative', 'token_details',
           'token_rejection', 'transform']
