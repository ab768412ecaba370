"""Evaluation counts every block once, whatever the batch and the devices, and states its errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import (
  config as config_lib,
  evaluation,
  keys,
  objective,
  orders as orders_lib,
  sharding,
)
from aogpt_jax.config import MeshConfig
from aogpt_jax.model import AOGPT, MaskedEncoder, ModelConfig

BLOCKS = np.random.default_rng(0).integers(0, 13, (11, 6)).astype(np.int32)
DRAWS = 3


@pytest.fixture(scope='module')
def model():
  return AOGPT(ModelConfig(vocab_size=13, context_length=6, num_layers=1, num_heads=2, embed_dim=16,
                           condition_dim=8, init_std=0.5, gate_init=0.5), rngs=nnx.Rngs(0))


@pytest.fixture(scope='module')
def scorer(model):
  """(number of devices) -> function of an order's name and a batch size."""
  graphdef, params = nnx.split(model, nnx.Param)
  made = {}
  def score(devices, order, batch_size, draws=DRAWS):
    if devices not in made:
      mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
      made[devices] = mesh, evaluation.make_block_nll(graphdef, sharding.replicated(mesh), mesh)
    mesh, block_nll = made[devices]
    return evaluation.evaluate(block_nll, params, BLOCKS, mesh, order,
                               evaluation.order_draw(orders_lib.make(order)), draws, batch_size)
  return score


@pytest.fixture(scope='module')
def by_hand(model):
  """NLL (draws, blocks, n) of all blocks in one batch, in uniform orders of (draw, block)."""
  nll = jax.jit(lambda tokens, orders: objective.token_nll(model, tokens, orders))
  uniform = orders_lib.make('uniform')
  return np.stack([nll(BLOCKS, uniform.sample(keys.stream_key(0, 'eval', draw), 11, 6))
                   for draw in range(DRAWS)]).astype(np.float64)


@pytest.mark.parametrize(('devices', 'batch_size'), [(1, 4), (1, 11), (1, 16), (8, 8), (8, 16)])
def test_every_block_counts_once(scorer, by_hand, devices, batch_size):
  """The mean by hand, for batches that divide 11 blocks and that do not, on 1 and 8 devices."""
  estimate = scorer(devices, 'uniform', batch_size)
  per_block = by_hand.mean(axis=2)
  np.testing.assert_allclose(estimate.nats_per_token, by_hand.mean(), rtol=0, atol=1e-5)
  np.testing.assert_allclose(estimate.error_over_orders,
                             np.std(per_block.mean(axis=1), ddof=1) / math.sqrt(DRAWS), rtol=1e-3)
  np.testing.assert_allclose(estimate.error_over_blocks,
                             np.std(per_block.mean(axis=0), ddof=1) / math.sqrt(11), rtol=1e-3)
  assert (estimate.order, estimate.num_draws, estimate.num_blocks, estimate.num_tokens) == (
      'uniform', DRAWS, 11, 66)
  assert estimate.perplexity == pytest.approx(math.exp(estimate.nats_per_token))


def test_left_to_right_needs_one_draw(scorer, model):
  """The identity order; no error over orders."""
  estimate = scorer(1, 'left_to_right', 11, draws=1)
  identity = np.tile(np.arange(6), (11, 1))
  np.testing.assert_allclose(estimate.nats_per_token,
                             objective.token_nll(model, jnp.asarray(BLOCKS), identity).mean(),
                             rtol=0, atol=1e-5)
  assert math.isnan(estimate.error_over_orders) and estimate.error_over_blocks > 0


def test_standard_errors_by_hand():
  """Numbers small enough for paper: 2 draws of 3 blocks."""
  estimate = evaluation.summarize('uniform', np.array([[1.0, 2.0, 6.0], [3.0, 2.0, 4.0]]))
  assert estimate.nats_per_token == 3
  assert estimate.error_over_orders == 0  # both draws average to 3
  assert estimate.error_over_blocks == pytest.approx(1.0)  # means 2, 2, 5: variance 3, over 3
  assert (estimate.num_draws, estimate.num_blocks, estimate.num_tokens) == (2, 3, 3)


def test_unigram_by_hand():
  """Counts 3, 1, 0 with add-one: probabilities 4/7, 2/7, 1/7."""
  nats = evaluation.unigram_nats(np.array([3, 1, 0]), [np.array([0, 0]), np.array([1, 2])])
  assert nats == pytest.approx(-math.log(4 * 4 * 2 * 1 / 7 ** 4) / 4)


def test_table_names_every_order():
  """One row an order, a dash for an unknown error, and the unigram line."""
  one = evaluation.summarize('left_to_right', np.array([[1.0, 2.0]]))
  table = evaluation.markdown_table([one], math.log(50.0)).splitlines()
  assert table[2] == '| left_to_right | 1.5000 | – | 0.5000 | 4.48 | 1 | 2 |'
  assert table[3].startswith('| unigram (no model) | 3.9120 |') and '| 50.00 |' in table[3]


@pytest.mark.parametrize(('changes', 'want'), [
    ({}, ['left_to_right', 'uniform']),
    ({'order': {'name': 'uniform'}}, ['left_to_right', 'uniform']),
    ({'order': {'name': 'fixed', 'seed': 3}}, ['left_to_right', 'uniform', 'fixed']),
    ({'model': {'target_injection': 'none'}, 'order': {'name': 'left_to_right'}},
     ['left_to_right']),
    ({'model': {'target_injection': 'none'}, 'order': {'name': 'fixed'}}, ['fixed'])])
def test_validation_takes_the_orders_that_the_model_knows(changes, want):
  """The run's own order besides the two of the paper; it alone if the target is not told."""
  config = config_lib.from_dict({
      'model': dict(vocab_size=13, context_length=6, num_layers=1, num_heads=2, embed_dim=16,
                    condition_dim=8) | changes.get('model', {}),
      'order': changes.get('order', {}), 'eval': dict(batch_size=8, num_orders=2)})
  draws = []
  def block_nll(params, tokens, orders):
    draws.append(np.asarray(orders))
    return np.full(tokens.shape, 2.0)
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  estimates = evaluation.validate(config, block_nll, None, BLOCKS, mesh)
  assert [e.order for e in estimates] == want
  assert [e.num_draws for e in estimates] == [2 if name == 'uniform' else 1 for name in want]
  own = orders_lib.make(config.order.name, **config.order.options()).sample(
      jax.random.key(0), 1, 6)
  if want[-1] == 'fixed':
    np.testing.assert_array_equal(draws[-1], np.tile(own, (8, 1)))


def test_an_encoder_is_scored_by_its_bound_and_by_prefixes_of_some_blocks():
  """The bound over all blocks and draws of exact counts; left to right on evenly spaced blocks."""
  config = config_lib.from_dict({
      'model': dict(architecture='encoder', target_injection='none', vocab_size=13,
                    context_length=6, num_layers=1, num_heads=2, embed_dim=16, init_std=0.5),
      'order': dict(name='uniform'), 'eval': dict(batch_size=8, num_orders=400, prefix_blocks=3)})
  model = MaskedEncoder(config.model, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(model, nnx.Param)
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  block_nll = evaluation.make_block_nll(graphdef, sharding.replicated(mesh), mesh)
  prefix, bound = evaluation.validate(config, block_nll, params, BLOCKS, mesh)
  some = jnp.asarray(BLOCKS[[0, 3, 7]])
  identity = jnp.tile(jnp.arange(6), (3, 1))
  want = objective.token_nll(model, some, identity).mean()
  assert (prefix.order, prefix.num_blocks) == ('left_to_right', 3)
  np.testing.assert_allclose(prefix.nats_per_token, want, rtol=0, atol=1e-5)
  orders = orders_lib.make('uniform').sample(jax.random.key(1), 4400, 6)
  nll = np.asarray(objective.token_nll(model, np.tile(BLOCKS, (400, 1)), orders), np.float64)
  nll = nll.reshape(400, -1).mean(axis=1)  # 400 draws of an order for each block
  error = math.hypot(bound.error_over_orders, np.std(nll) / 20)
  assert (bound.order, bound.num_blocks, bound.num_draws) == ('uniform', 11, 400)
  assert abs(bound.nats_per_token - np.mean(nll)) < 4 * error < 0.1
  cheap = evaluation.validate(config, block_nll, params, BLOCKS, mesh, every_order=False)
  assert cheap == [bound]
