"""Ensembles over context orders: the reference's numbers, terms from prefixes, honest errors."""

import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import evaluation, interop, keys, objective, orders as orders_lib, sharding
from aogpt_jax.config import MeshConfig, ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.evaluation import ensemble
from aogpt_jax.model import AOGPT

N, BLOCKS = 20, 9
TOKENS = np.random.default_rng(0).integers(0, 11, (BLOCKS, N)).astype(np.int32)


@pytest.fixture(autouse=True)
def few_lengths(monkeypatch):
  """Each length is compiled anew, which takes longer than to run it."""
  monkeypatch.setattr(ensemble, 'LENGTHS', 4)


@pytest.fixture(scope='module')
def reference(golden):
  """Golden arrays and the model with their weights."""
  arrays = golden('ensemble')
  params = {k.removeprefix('param/'): a for k, a in arrays.items() if k.startswith('param/')}
  return arrays, interop.from_reference_arrays(json.loads(str(arrays['config'])), params)


@pytest.fixture(scope='module')
def model():
  return AOGPT(ModelConfig(vocab_size=11, context_length=N, num_layers=2, num_heads=2,
                           embed_dim=16, condition_dim=8, init_std=0.6, gate_init=0.5),
               rngs=nnx.Rngs(0))


@pytest.fixture(scope='module')
def run(model):
  """(sizes, steps, number of devices) -> estimates of the toy blocks."""
  graphdef, params = nnx.split(model)
  made = {}
  def estimates(sizes, steps, devices=1, blocks=TOKENS):
    if devices not in made:
      mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
      everywhere = sharding.replicated(mesh)
      made[devices] = (evaluation.make_block_nll(graphdef, everywhere, mesh),
                       evaluation.make_step_nll(graphdef, everywhere, mesh), mesh)
    block_nll, step_nll, mesh = made[devices]
    return evaluation.evaluate_ensemble(block_nll, step_nll, params, blocks, mesh, sizes, steps,
                                        batch_size=8)
  return estimates


def test_ensembles_of_the_reference(reference):
  """Given context orders: every conditional, and the ensembles of 1, 2 and 4, within 1e-5."""
  arrays, model = reference
  tokens, contexts = (arrays[name].astype(np.int32) for name in ('tokens', 'context_orders'))
  nll = evaluation.context_nll(model, tokens, contexts)
  np.testing.assert_allclose(nll, arrays['nll'], rtol=0, atol=1e-5)
  curve = evaluation.ensemble_curve(np.moveaxis(nll, -1, 0), [1, 2, 4])
  means = [curve[size].mean() for size in (1, 2, 4)]
  np.testing.assert_allclose(means, arrays['ensembled_nll'], rtol=0, atol=1e-5)
  assert means[0] - means[2] > 0.05  # 1e-5 is far below what there is to get wrong


def test_one_context_order_is_the_plain_nll_exactly(reference):
  arrays, model = reference
  tokens, orders = (arrays[name].astype(np.int32) for name in ('tokens', 'orders'))
  plain = jax.jit(objective.token_nll)(model, tokens, orders)
  got = evaluation.ensemble_nll(model, tokens, orders, 1, jax.random.key(0))
  np.testing.assert_array_equal(got, np.asarray(plain, np.float64))


def test_members_permute_the_context_alone(model):
  """Every permutation of 3 equally often; what follows stays; a row depends on its own numbers."""
  order = np.arange(N, dtype=np.int32)[::-1].copy()
  rows = 6000
  orders, at = np.tile(order, (rows, 1)), np.full(rows, 3, np.int32)
  got = np.asarray(evaluation.member_orders(jax.random.key(0), orders, np.arange(rows), at, 1))
  np.testing.assert_array_equal(got[:, 3:], orders[:, 3:])
  kinds, counts = np.unique(got[:, :3], axis=0, return_counts=True)
  assert len(kinds) == 6 and set(kinds[0]) == set(order[:3])
  assert ((counts - 1000) ** 2 / 1000).sum() < 20.5  # chi-square with 5 degrees, p = 0.001
  some = evaluation.member_orders(jax.random.key(0), orders[:5], np.arange(40, 45), at[:5], 1)
  np.testing.assert_array_equal(some, got[40:45])
  other = evaluation.member_orders(jax.random.key(0), orders, np.arange(rows), at, 2)
  assert (np.asarray(other) != got).any(axis=1).mean() > 0.7


def _by_hand(model, orders, size):
  """The exact ensemble of size M with full forward passes, one for every step and member."""
  key = keys.stream_key(0, 'eval', 0)
  nll = jax.jit(objective.token_nll)
  probability = np.zeros((BLOCKS, N))
  for member in range(size):
    for t in range(N):
      contexts = orders if member == 0 else evaluation.member_orders(
          key, orders, np.arange(BLOCKS), np.full(BLOCKS, t), member)
      probability[:, t] += np.exp(-np.asarray(nll(model, TOKENS, contexts), np.float64)[:, t])
  return -np.log(probability / size)


def test_exact_curve_is_the_one_of_full_forwards(model, run):
  """Also on 8 devices, and in one call with ensemble_nll's public form; item counts add up."""
  orders = np.asarray(orders_lib.make('uniform').sample(keys.stream_key(0, 'eval', 0), BLOCKS, N))
  want = {size: _by_hand(model, orders, size) for size in (1, 2, 3)}
  for devices in (1, 8):
    found = run([1, 2, 3], 0, devices)
    assert [e.num_ensembles for e in found] == [1, 2, 3]
    for e in found:
      np.testing.assert_allclose(e.nats_per_token, want[e.num_ensembles].mean(), rtol=0, atol=1e-5)
      per_block = want[e.num_ensembles].mean(axis=1)
      np.testing.assert_allclose(e.error_over_blocks, per_block.std(ddof=1) / 3, rtol=1e-3)
      gain = (want[1] - want[e.num_ensembles]).mean(axis=1)
      np.testing.assert_allclose(e.gain, gain.mean(), rtol=0, atol=1e-5)
      np.testing.assert_allclose(e.gain_error, gain.std(ddof=1) / 3, rtol=0, atol=1e-5)
      assert e.error_over_positions == 0
      assert e.perplexity == pytest.approx(math.exp(e.nats_per_token))
  direct = evaluation.ensemble_nll(model, TOKENS, orders, 3, keys.stream_key(0, 'eval', 0))
  np.testing.assert_allclose(direct, want[3], rtol=0, atol=1e-5)
  assert want[3].mean() < want[1].mean() - 0.01


def test_work_is_counted_and_about_half(run):
  """Plain: blocks · n. A member: prefixes rounded up to one of LENGTHS lengths, and padding."""
  tokens = np.resize(TOKENS, (64, N))
  one, two = run([1, 2], 0, blocks=tokens)
  step = -(-N // ensemble.LENGTHS)
  lengths = [min((t // step + 1) * step, N) for t in range(2, N)]
  assert one.items == 64 * N
  assert two.exact_items == 64 * (N + sum(lengths))
  assert two.exact_items <= two.items < 1.1 * two.exact_items
  assert two.full_forward_items == 64 * N * N * 2


def test_the_items_of_a_long_context_are_at_most_055_of_full_forwards(monkeypatch):
  """n = 1024, M = 64, from the same functions that cut the work; nothing is computed."""
  monkeypatch.undo()
  n, blocks, members = 1024, 2, 64
  at = np.tile(np.arange(2, n), blocks)
  member = sum(rows * length for _, rows, length in ensemble._calls(at, n, 4))
  items = blocks * n + (members - 1) * member
  assert 0.5 < items / (blocks * n * n * members) <= 0.55


def test_sampled_steps_estimate_the_mean_of_all():
  """Unbiased, with the standard error that is stated: 2,000 choices of 5 of 20 steps."""
  rng = np.random.default_rng(0)
  plain = rng.gamma(2.0, size=(BLOCKS, N))
  ensembled = plain - rng.gamma(1.0, 0.1, size=(BLOCKS, N))
  errors, stated = [], []
  for _ in range(2000):
    chosen = np.stack([rng.choice(N, 5, replace=False) for _ in range(BLOCKS)])
    per_block, error = ensemble.per_block_nats(
        plain, chosen, np.take_along_axis(ensembled, chosen, axis=1))
    errors.append(per_block.mean() - ensembled.mean())
    stated.append(error)
  assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(2000)
  assert np.sqrt(np.mean(np.square(stated))) == pytest.approx(np.std(errors), rel=0.05)
  assert np.std(errors) < 0.3 * np.std(plain) / math.sqrt(5 * BLOCKS)  # what the plain NLL saves


def test_sampled_steps_agree_with_all_of_them(run):
  """The whole path: within its error of the exact value, in less than 0.6 of the work."""
  (exact,) = run([3], 0)
  (some,) = run([3], 5)
  error = some.nats_per_token - exact.nats_per_token
  assert 0 < abs(error) < 4 * some.error_over_positions < 1.5
  assert some.steps_per_block == 5 and some.items < 0.7 * exact.items


@pytest.mark.parametrize('steps', [1, N + 1])
def test_impossible_numbers_of_steps(run, steps):
  with pytest.raises(UserError, match=f'ensemble_steps={steps}: must be in 2..20'):
    run([2], steps)


def test_no_ensemble_of_nobody(model):
  with pytest.raises(UserError, match='num_ensembles=0'):
    evaluation.ensemble_nll(model, TOKENS, TOKENS, 0, jax.random.key(0))
