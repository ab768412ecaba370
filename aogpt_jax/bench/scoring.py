"""Suite evaluate: what scoring costs, and how many items an exact ensemble computes."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import evaluation, model as model_lib, orders as orders_lib, sharding as sharding_lib
from aogpt_jax.bench import measure, peers, training
from aogpt_jax.bench.results import Table
from aogpt_jax.config import Config, OrderConfig

SIZES = (1, 2, 8, 64)  # of ensembles, the paper's


def _score(config: Config, tokens: np.ndarray, order: str) -> Callable[[], jax.Array]:
  """A run: one batch as `evaluation.evaluate` scores it, its orders drawn ahead."""
  mesh = training.one_device()
  graphdef, params = nnx.split(model_lib.make(config.model, rngs=nnx.Rngs(0)))
  shardings = sharding_lib.state_shardings(mesh, nnx.to_pure_dict(params))
  block_nll = evaluation.make_block_nll(graphdef, shardings, mesh)
  weights = jax.device_put(nnx.to_pure_dict(params), shardings)
  draw = jax.jit(evaluation.order_draw(orders_lib.make(order)), static_argnums=2)
  batch = [sharding_lib.global_array_from_all_rows(np.asarray(x), sharding_lib.batch_sharding(mesh))
           for x in (tokens, draw(jnp.int32(0), jnp.arange(len(tokens)), tokens.shape[1]))]
  return lambda: block_nll(weights, *batch)


def ensemble_items(config: Config) -> Table:
  """Items of exact ensembles over one block, counted by the evaluation itself with no model."""
  n = config.model.context_length
  block_nll = lambda params, tokens, orders: np.zeros(tokens.shape)
  step_nll = lambda params, tokens, orders, at, length: np.zeros(len(at))
  found = evaluation.evaluate_ensemble(
      block_nll, step_nll, None, np.zeros((1, n), np.int32), training.one_device(), SIZES, 0, 1)
  return Table(f'Exact ensembles over context orders of one block of {n} tokens: items computed',
               ('num_ensembles', 'items', 'of_full_forwards'),
               [{'num_ensembles': e.num_ensembles, 'items': e.items,
                 'of_full_forwards': e.items / e.full_forward_items} for e in found])


def evaluate(config: Config, peer: str) -> Iterator[Table]:
  """Scoring in any order and left to right against the loss of GPT-2 of Hugging Face."""
  model, batch = config.model, config.eval.batch_size
  tokens = training.random_tokens(config, batch)
  peak, peaks = measure.model_peak(model)
  gpt = dataclasses.replace(config, model=training.gpt_model(model),
                            order=OrderConfig('left_to_right'))
  runs: dict[str, Callable[[], Any]] = {
      'aogpt_jax, uniform orders': _score(config, tokens, 'uniform'),
      "aogpt_jax, left to right, GPT-2's shape": _score(gpt, tokens, 'left_to_right')}
  other = None
  if peer != 'none':
    other = 'Hugging Face GPT-2, sdpa, inference mode'
    runs[other] = peers.scoring(model, tokens)
  times = measure.interleaved(runs, calls=measure.calls_a_run())
  rows = [measure.timed(name, timing) | measure.rates(timing, tokens.size)
          | measure.work(timing, tokens.size, measure.forward_flops(model), peak)
          | measure.spread('to_peer', other and measure.ratio(times[other], timing))
          for name, timing in times.items()]
  yield Table(
      f'Scoring of {batch} × {model.context_length} random tokens, {training.sizes(model)}; median '
      '(range) of runs in turn',
      ('name', 'tokens_per_second', 'seconds', 'to_peer', 'flops_per_token', 'flops_per_second',
       'share', 'first_seconds', 'runs'), rows,
      (f'FLOPs a token: 2 a weight in a matmul and 4·L·n·d for attention. The first call compiles. '
       f'{peaks}',))
  if model.architecture == 'decoder' and model.knows_target:
    yield ensemble_items(config)
