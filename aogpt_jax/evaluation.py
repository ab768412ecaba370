"""Perplexity of held-out blocks, left to right and in any order, with standard errors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import data, keys, objective, orders as orders_lib, sharding as sharding_lib


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Mean NLL over all tokens of all blocks, every block once a draw; nats per token.

  error_over_orders: standard error of the mean from drawing orders, nan for a single draw.
  error_over_blocks: standard error from the choice of blocks, that is, of text.
  """

  order: str
  nats_per_token: float
  error_over_orders: float
  error_over_blocks: float
  num_draws: int
  num_blocks: int
  num_tokens: int

  @property
  def perplexity(self) -> float:
    return math.exp(self.nats_per_token)


def as_json(estimate: Estimate) -> dict[str, Any]:
  """The fields and the perplexity; an error that a single draw cannot give is null."""
  fields = dataclasses.asdict(estimate) | {'perplexity': estimate.perplexity}
  return {name: None if value != value else value for name, value in fields.items()}


def _standard_error(values: np.ndarray) -> float:
  return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def summarize(order: str, nats: np.ndarray) -> Estimate:
  """Makes an Estimate from nats (draws, blocks, n) or (draws, blocks) sums with n = 1."""
  draws, blocks = nats.shape[:2]
  per_block = nats.reshape(draws, blocks, -1).mean(axis=-1)
  return Estimate(order, float(per_block.mean()), _standard_error(per_block.mean(axis=1)),
                  _standard_error(per_block.mean(axis=0)), draws, blocks,
                  nats[0].size)


def make_block_nll(graphdef: nnx.GraphDef, param_shardings: Any, mesh: jax.sharding.Mesh,
                   ) -> Callable[..., jax.Array]:
  """Compiles f(params, tokens, orders) -> NLL (B, n) float32 nats, in generation order."""
  rows = sharding_lib.batch_sharding(mesh)
  return jax.jit(lambda params, *batch: objective.token_nll(nnx.merge(graphdef, params), *batch),
                 in_shardings=(param_shardings, rows, rows),
                 out_shardings=sharding_lib.replicated(mesh))


def evaluate(block_nll: Callable[..., jax.Array], params: Any, blocks: Any, mesh: jax.sharding.Mesh,
             order: orders_lib.OrderDistribution, num_draws: int, batch_size: int,
             ) -> Estimate:
  """Scores every block exactly once for each draw of orders.

  The order of block i in draw k depends on (k, i) alone: every evaluation, of any model, with any
  batch size and number of devices, uses the same ones.

  Args:
    block_nll: from `make_block_nll`.
    params: nested dict of arrays (EMA weights by default).
    blocks: random access, blocks[i] (n,) int32.
    mesh: where the batches go.
    order: distribution to draw from.
    num_draws: orders a block; 1 for a deterministic order.
    batch_size: B; the last batch is padded with rows that are not counted.

  Returns:
    An Estimate.
  """
  rows = sharding_lib.batch_sharding(mesh)
  draw_orders = jax.jit(
      lambda draw, index, length: jax.vmap(lambda k: order.row(k, length))(
          keys.row_keys(keys.stream_key(0, 'eval', draw), index)),
      static_argnums=2)
  nats = []
  for draw in range(num_draws):
    for tokens, weights, index in data.eval_batches(blocks, batch_size):
      orders = np.asarray(draw_orders(draw, jnp.asarray(index), tokens.shape[1]))
      place = lambda x: sharding_lib.global_array_from_all_rows(x, rows)
      nll = np.asarray(block_nll(params, place(tokens), place(orders)), np.float64)
      nats.append(nll[weights > 0])
  nats = np.concatenate(nats)
  return summarize(order.name, nats.reshape(num_draws, -1, nats.shape[1]))


def unigram_nats(train_counts: np.ndarray, blocks: Any) -> float:
  """Cross entropy of the blocks' tokens under the training unigram law (add-one), nats per token.

  What a model scores that knows only how frequent each token is: the line to beat.

  Args:
    train_counts: (V,) occurrences of each id in the training blocks.
    blocks: random access, blocks[i] (n,) int32.
  """
  log_probs = np.log(train_counts + 1.0) - np.log(train_counts.sum() + len(train_counts))
  return float(-np.mean([log_probs[blocks[i]].mean() for i in range(len(blocks))]))


def markdown_table(estimates: list[Estimate], unigram: float) -> str:
  """The validation table: nats and perplexity with both standard errors."""
  lines = ['| order | nats/token | ± over orders | ± over blocks | perplexity | draws | tokens |',
           '|---|---|---|---|---|---|---|']
  for e in estimates:
    over_orders = '–' if math.isnan(e.error_over_orders) else f'{e.error_over_orders:.4f}'
    lines.append(f'| {e.order} | {e.nats_per_token:.4f} | {over_orders} | {e.error_over_blocks:.4f}'
                 f' | {e.perplexity:.2f} | {e.num_draws} | {e.num_tokens:,} |')
  lines.append(f'| unigram (no model) | {unigram:.4f} | – | – | {math.exp(unigram):.2f} | – | '
               f'{estimates[0].num_tokens:,} |')
  return '\n'.join(lines)
