"""What a model is worth: perplexity, ensembles over context orders, the quality of its texts."""

from aogpt_jax.evaluation.ensemble import (
  EnsembleEstimate,
  context_nll,
  ensemble_curve,
  ensemble_nll,
  evaluate_ensemble,
  make_step_nll,
  member_orders,
)
from aogpt_jax.evaluation.perplexity import (
  Estimate,
  as_json,
  estimate,
  evaluate,
  evenly_spaced,
  known_orders,
  make_block_nll,
  markdown_table,
  mask_draw,
  order_draw,
  summarize,
  unigram_nats,
  validate,
)

__all__ = ['EnsembleEstimate', 'Estimate', 'as_json', 'context_nll', 'ensemble_curve',
           'ensemble_nll', 'estimate', 'evaluate', 'evaluate_ensemble', 'evenly_spaced',
           'known_orders', 'make_block_nll', 'make_step_nll', 'markdown_table', 'mask_draw',
           'member_orders', 'order_draw', 'summarize', 'unigram_nats', 'validate']
