"""The objective against brute force: every order, every sequence, every masked set."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import masks as masks_lib, objective
from aogpt_jax.model import AOGPT, MaskedEncoder, ModelConfig

V, N = 3, 4
SEQUENCES = np.array(list(itertools.product(range(V), repeat=N)), np.int32)  # (81, 4)
ORDERS = np.array(list(itertools.permutations(range(N))), np.int32)  # (24, 4)
ENCODINGS = ('learned', 'target_rotary')


@functools.cache
def _model(encoding, **changes):
  """A tiny model whose weights are large enough that order and context matter a lot."""
  return AOGPT(ModelConfig(**(dict(
      vocab_size=V, context_length=N, num_layers=2, num_heads=2, embed_dim=16, condition_dim=8,
      position_encoding=encoding, rotary_base=10.0, use_bias=True, init_std=0.5) | changes)),
      rngs=nnx.Rngs(1))


def _all_pairs(orders):
  """Tokens and orders (len(orders) * 81, 4): every order with every sequence."""
  return np.tile(SEQUENCES, (len(orders), 1)), np.repeat(orders, len(SEQUENCES), axis=0)


@functools.cache
def _order_nll(encoding):
  """(24, 81, 4) float64: NLL in generation order."""
  nll = jax.jit(functools.partial(objective.token_nll, _model(encoding)))(*_all_pairs(ORDERS))
  return np.asarray(nll, np.float64).reshape(len(ORDERS), len(SEQUENCES), N)


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_every_order_is_a_distribution_over_sequences(encoding):
  """For each of 24 orders the probabilities of all 81 sequences sum to 1; a leak breaks this."""
  joint = np.exp(-_order_nll(encoding).sum(axis=-1))
  np.testing.assert_allclose(joint.sum(axis=1), 1, rtol=0, atol=1e-5)
  assert joint.std(axis=0).max() > 0.01  # the orders disagree: one sum is not another's


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_uniform_orders_give_the_masked_diffusion_bound(encoding):
  """E_σ Σ_t -log p = ∫ 1/t E[Σ_{i masked} -log p(x_i | x_t)] dt, sequence by sequence.

  Each position is masked with probability t by itself. A set M of m masked positions out of n has
  weight ∫ 1/t t^m (1-t)^(n-m) dt = B(m, n-m+1) = (m-1)! (n-m)! / n!, and -log p(x_i | x_t) of this
  decoder is its mean over the orders of the unmasked context.
  """
  terms = []  # (weight, order that generates a context and then i, index of i in it)
  for m in range(1, N + 1):
    weight = math.factorial(m - 1) * math.factorial(N - m) / math.factorial(N)
    for masked in itertools.combinations(range(N), m):
      contexts = list(itertools.permutations(sorted(set(range(N)) - set(masked))))
      for context, target in itertools.product(contexts, masked):
        rest = [i for i in masked if i != target]
        terms.append((weight / len(contexts), [*context, target, *rest], N - m))
  weights, orders, index = (np.array(column) for column in zip(*terms))
  assert len(terms) == 64
  tokens, row_orders = _all_pairs(orders.astype(np.int32))
  logits = jax.jit(_model(encoding).__call__)(tokens, row_orders)
  log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
  rows = np.arange(len(tokens))
  row_index = np.repeat(index, len(SEQUENCES))
  targets = tokens[rows, row_orders[rows, row_index]]
  nll = -log_probs[rows, row_index, targets].reshape(len(terms), len(SEQUENCES))
  bound = (weights[:, None] * nll).sum(axis=0)
  ao_ar = _order_nll(encoding).sum(axis=-1)
  np.testing.assert_allclose(ao_ar.mean(axis=0), bound, rtol=0, atol=1e-5)
  assert np.abs(ao_ar - bound).max() > 0.1  # no single order would do


def test_loss_is_the_mean_over_tokens():
  """`ao_ar_loss` in nats per token, of all 81 sequences along one order."""
  tokens, orders = _all_pairs(ORDERS[17:18])
  loss = objective.ao_ar_loss(_model('learned'), jnp.asarray(tokens), jnp.asarray(orders))
  chex.assert_shape(loss, ())
  np.testing.assert_allclose(loss, _order_nll('learned')[17].mean(), rtol=1e-5)


@functools.cache
def _value_and_gradient(loss_chunk):
  """NLL (2, 7) and the gradient of a weighted sum of it, for a model of context 7."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, V, (2, 7)).astype(np.int32)
  orders = rng.permuted(np.tile(np.arange(7, dtype=np.int32), (2, 1)), axis=1)
  model = _model('learned', context_length=7, num_layers=1, loss_chunk=loss_chunk)
  graphdef, params = nnx.split(model)

  def loss(params):
    nll = objective.token_nll(nnx.merge(graphdef, params), tokens, orders)
    return (jnp.arange(14.0).reshape(2, 7) * nll).sum(), nll  # the weights tell tokens apart

  (_, nll), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  return nll, nnx.to_pure_dict(gradient)


@pytest.mark.parametrize('chunk', [1, 3, 5, 99])
def test_chunked_loss_equals_the_whole(chunk):
  """Value of every token and gradient of every parameter; 3 and 5 do not divide n = 7."""
  chex.assert_shape(_value_and_gradient(chunk)[0], (2, 7))
  chex.assert_trees_all_close(_value_and_gradient(chunk), _value_and_gradient(0), rtol=1e-5,
                              atol=1e-4)


@functools.cache
def _encoder(**changes):
  return MaskedEncoder(ModelConfig(**(dict(
      architecture='encoder', target_injection='none', vocab_size=V, context_length=N, num_layers=2,
      num_heads=2, embed_dim=16, use_bias=True, init_std=0.5) | changes)), rngs=nnx.Rngs(1))


@functools.cache
def _encoder_bound():
  """(81,) float64 nats: the bound of every sequence, enumerated over all 15 masks."""
  bound = np.zeros(len(SEQUENCES))
  logits = jax.jit(_encoder().__call__)
  for masked in itertools.product((False, True), repeat=N):
    m = sum(masked)
    if not m:
      continue
    weight = math.factorial(m - 1) * math.factorial(N - m) / math.factorial(N)
    log_probs = jax.nn.log_softmax(logits(SEQUENCES, np.tile(masked, (len(SEQUENCES), 1))))
    picked = np.take_along_axis(np.asarray(log_probs, np.float64), SEQUENCES[..., None], axis=2)
    bound -= weight * picked[..., 0][:, np.array(masked)].sum(axis=1)
  return bound


def test_an_encoder_s_bound_is_its_any_order_loss():
  """Over all masks, and over all 24 orders by growing prefixes: the same, for all 81 sequences.

  Its conditionals do not depend on the order of the context, so nothing is averaged away.
  """
  nll = jax.jit(functools.partial(objective.token_nll, _encoder()))(*_all_pairs(ORDERS))
  chex.assert_shape(nll, (24 * 81, N))
  by_order = np.asarray(nll, np.float64).sum(axis=1).reshape(24, 81)
  np.testing.assert_allclose(by_order.mean(axis=0), _encoder_bound(), rtol=0, atol=1e-5)
  assert by_order.std(axis=0).max() > 0.1  # single orders differ


def test_prefix_nll_is_in_generation_order():
  """Term t is that of the token generated at step t, given the t tokens before it."""
  tokens, orders = SEQUENCES[50:51], np.array([[2, 0, 3, 1]], np.int32)
  got = objective.token_nll(_encoder(), jnp.asarray(tokens), jnp.asarray(orders))[0]
  for t, position in enumerate(orders[0]):
    masked = ~np.isin(np.arange(N), orders[0, :t])
    log_probs = jax.nn.log_softmax(_encoder()(tokens, masked[None]))[0, position]
    np.testing.assert_allclose(got[t], -log_probs[tokens[0, position]], rtol=0, atol=1e-5)


@pytest.mark.parametrize('masking', ['linear', 'cosine', 'count'])
def test_every_masking_estimates_the_bound(masking):
  """The mean of 60,000 draws is within 4 standard errors; weights of another kind are far off."""
  rows = 60_000
  tokens = np.tile(SEQUENCES[50], (rows, 1))
  draws = masks_lib.sample(masking, jax.random.key(0), jnp.arange(rows), rows, N)
  nll = jax.jit(functools.partial(objective.loss_terms, _encoder()))(tokens, draws)
  sums = np.asarray(nll, np.float64).sum(axis=1)
  error = sums.std() / math.sqrt(rows)
  assert abs(sums.mean() - _encoder_bound()[50]) < 4 * error
  assert error < 0.06 and abs(_encoder_bound()[50] - _encoder_bound().mean()) > 0.2


def test_masked_nll_is_zero_where_known_and_chunked_alike():
  """Entries of known tokens are exactly 0; chunks of 3 in n = 4 change nothing."""
  draws = masks_lib.sample('count', jax.random.key(1), jnp.arange(81), 81, N)
  whole, chunked = (objective.masked_nll(_encoder(loss_chunk=chunk), SEQUENCES, draws)
                    for chunk in (0, 3))
  np.testing.assert_array_equal(whole != 0, draws.masked)
  chex.assert_trees_all_close(whole, chunked, rtol=1e-5, atol=1e-5)
