"""Perplexity of held-out blocks, left to right and in any order, with standard errors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import data, keys, masks, objective, orders as orders_lib, sharding as sharding_lib
from aogpt_jax.config import Config, OrderConfig, check

# (draw, row numbers (B,), n) -> what is drawn for those rows: orders (B, n), or Masks.
Draw = Callable[[jax.Array, jax.Array, int], Any]


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


def standard_error(values: np.ndarray) -> float:
  return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def summarize(order: str, nats: np.ndarray) -> Estimate:
  """Makes an Estimate from nats (draws, blocks, n) or (draws, blocks) sums with n = 1."""
  draws, blocks = nats.shape[:2]
  per_block = nats.reshape(draws, blocks, -1).mean(axis=-1)
  return Estimate(order, float(per_block.mean()), standard_error(per_block.mean(axis=1)),
                  standard_error(per_block.mean(axis=0)), draws, blocks,
                  nats[0].size)


def make_block_nll(graphdef: nnx.GraphDef, param_shardings: Any, mesh: jax.sharding.Mesh,
                   ) -> Callable[..., jax.Array]:
  """Compiles f(params, tokens, orders or Masks) -> (B, n) float32 nats: `objective.loss_terms`."""
  rows = sharding_lib.batch_sharding(mesh)
  nll = lambda params, *batch: objective.loss_terms(nnx.merge(graphdef, params), *batch)
  return jax.jit(sharding_lib.on_mesh(mesh, nll),
                 in_shardings=(param_shardings, rows, rows),
                 out_shardings=sharding_lib.replicated(mesh))


def order_draw(order: orders_lib.OrderDistribution) -> Draw:
  """Orders for `evaluate`: that of block i in draw k depends on (k, i) alone.

  Every evaluation, of any model, with any batch size and number of devices, uses the same ones.
  """
  return lambda draw, index, length: jax.vmap(lambda key: order.row(key, length))(
      keys.row_keys(keys.stream_key(0, 'eval', draw), index))


def mask_draw(num_blocks: int) -> Draw:
  """Masks for `evaluate` that estimate an encoder's bound; counts spread over all blocks."""
  return lambda draw, index, length: masks.sample(
      'count', keys.stream_key(0, 'eval', draw), index, num_blocks, length)


def evaluate(block_nll: Callable[..., jax.Array], params: Any, blocks: Any, mesh: jax.sharding.Mesh,
             name: str, draw: Draw, num_draws: int, batch_size: int) -> Estimate:
  """Scores every block exactly once for each draw.

  Args:
    block_nll: from `make_block_nll`.
    params: nested dict of arrays (EMA weights by default).
    blocks: random access, blocks[i] (n,) int32.
    mesh: where the batches go.
    name: of the Estimate: the order.
    draw: `order_draw` or `mask_draw`.
    num_draws: draws a block; 1 for a deterministic order.
    batch_size: B; the last batch is padded with rows that are not counted.

  Returns:
    An Estimate.
  """
  sharding = sharding_lib.batch_sharding(mesh)
  rows = sharding_lib.host_rows(sharding, batch_size)  # those that this process has to read
  place = lambda x: sharding_lib.global_array_from_all_rows(np.asarray(x), sharding)
  draw = jax.jit(draw, static_argnums=2)
  nats = []
  for k in range(num_draws):
    for tokens, weights, index in data.eval_batches(blocks, batch_size, rows):
      tokens = sharding_lib.global_array(tokens, rows, sharding, batch_size)
      drawn = jax.tree.map(place, draw(k, jnp.asarray(index), tokens.shape[1]))
      nll = np.asarray(block_nll(params, tokens, drawn), np.float64)
      nats.append(nll[weights > 0])
  nats = np.concatenate(nats)
  return summarize(name, nats.reshape(num_draws, -1, nats.shape[1]))


def evenly_spaced(blocks: Any, count: int) -> Any:
  """At most `count` of the blocks, spread over all of them; 0: all."""
  if not count or count >= len(blocks):
    return blocks
  return [blocks[i * len(blocks) // count] for i in range(count)]


def known_orders(config: Config) -> list[str]:
  """Names of the orders that a run is scored in: left to right, uniform, and its own.

  A model that is not told its next position is scored in its own order alone.
  """
  own = config.order.name
  if not config.model.knows_target:
    return [own]
  return ['left_to_right', 'uniform'] + [own] * (own not in ('left_to_right', 'uniform', 'mixture'))


def estimate(config: Config, block_nll: Callable[..., jax.Array], params: Any, blocks: Any,
             mesh: jax.sharding.Mesh, order: str) -> Estimate:
  """The estimate of config.eval in the orders of one name.

  An encoder's uniform estimate is its bound; any other order needs n forward passes a block, so
  that takes config.eval.prefix_blocks blocks.

  Args:
    config: of the run; an order that is the run's own has the run's options.
    block_nll, params, mesh: as in `evaluate`.
    blocks: random access, blocks[i] (n,) int32.
    order: a name that `orders.make` knows.

  Raises:
    UserError: for an order that there is not, or that the model does not know.
  """
  own, settings = config.order, config.eval
  check(config.model.knows_target or order == own.name, 'order', order,
        f'this model is not told the next position, so it knows its own order only: {own.name}')
  run = lambda blocks, draw, num_draws: evaluate(block_nll, params, blocks, mesh, order, draw,
                                                 num_draws, settings.batch_size)
  if config.model.architecture == 'encoder':
    if order == 'uniform':
      return run(blocks, mask_draw(len(blocks)), settings.num_orders)
    blocks = evenly_spaced(blocks, settings.prefix_blocks)
  kind = own if order == own.name else OrderConfig(order)
  return run(blocks, order_draw(orders_lib.make(order, **kind.options())),
             settings.num_orders if kind.varies else 1)


def validate(config: Config, block_nll: Callable[..., jax.Array], params: Any, blocks: Any,
             mesh: jax.sharding.Mesh, every_order: bool = True) -> list[Estimate]:
  """One `estimate` for each of `known_orders`.

  every_order: False leaves out what is expensive: left to right for an encoder.
  """
  names = known_orders(config)
  if config.model.architecture == 'encoder' and not every_order:
    names = ['uniform']
  return [estimate(config, block_nll, params, blocks, mesh, name) for name in names]


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
               f'{max(e.num_tokens for e in estimates):,} |')
  return '\n'.join(lines)
