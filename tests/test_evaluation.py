"""Evaluation counts every block once, whatever the batch and the devices, and states its errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import evaluation, keys, objective, orders as orders_lib, sharding
from aogpt_jax.config import MeshConfig
from aogpt_jax.model import AOGPT, ModelConfig

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
    return evaluation.evaluate(block_nll, params, BLOCKS, mesh, orders_lib.make(order), draws,
                               batch_size)
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
