"""Adaptive orders: the position that is chosen, the law of the text, rows of their own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, MaskedEncoder, ModelConfig
from aogpt_jax.sampling import SamplingRule, adaptive
from aogpt_jax.sampling.adaptive import certainty

V, N = 3, 4
SEQUENCES = np.array(list(itertools.product(range(V), repeat=N)), np.int32)


@functools.cache
def _model(**changes):
  return AOGPT(ModelConfig(**(dict(
      vocab_size=V, context_length=N, num_layers=2, num_heads=2, embed_dim=16, condition_dim=8,
      use_bias=True, init_std=0.35, gate_init=0.5) | changes)), rngs=nnx.Rngs(1))


def test_certainty_by_hand():
  logits = jnp.log(jnp.array([0.7, 0.2, 0.1, 0.0]))
  np.testing.assert_allclose(certainty(logits, 'confidence'), np.log(0.7), rtol=1e-5)
  np.testing.assert_allclose(certainty(logits, 'margin'), 0.5, rtol=1e-5)
  want = 0.7 * np.log(0.7) + 0.2 * np.log(0.2) + 0.1 * np.log(0.1)
  np.testing.assert_allclose(certainty(logits, 'entropy'), want, rtol=1e-5)


def _paths(policy):
  """The order in which each of 81 texts would come about, and its probability, by full forwards."""
  forward = jax.jit(_model().__call__)
  orders = np.zeros((81, 0), np.int32)
  law = np.ones(81)
  for step in range(N):
    laws = np.full((81, N, V), np.nan)
    for candidate in range(N):
      rest = [np.setdiff1d(np.arange(N), [*row, candidate]) for row in orders]
      taken = (orders == candidate).any(axis=1)
      whole = np.array([[*row, candidate, *others][:N] if not used else range(N)
                        for row, others, used in zip(orders, rest, taken)], np.int32)
      logits = np.asarray(forward(SEQUENCES, whole), np.float64)[:, step]
      laws[:, candidate] = np.where(taken[:, None], np.nan, logits)
    score = np.asarray(certainty(jnp.asarray(laws), policy), np.float64)
    chosen = np.nanargmax(np.where(np.isnan(laws[..., 0]), np.nan, score), axis=1)
    probs = scipy.special.softmax(laws[np.arange(81), chosen], axis=1)
    law *= probs[np.arange(81), SEQUENCES[np.arange(81), chosen]]
    orders = np.concatenate([orders, chosen[:, None].astype(np.int32)], axis=1)
  return orders, law


@pytest.mark.parametrize('policy', ['confidence', 'entropy', 'margin'])
def test_law_and_path(policy):
  """30,000 texts follow the enumerated law, and each came about in the order of its path."""
  orders, law = _paths(policy)
  np.testing.assert_allclose(law.sum(), 1, atol=1e-4)
  identity = np.tile(np.arange(N), (30_000, 1))
  drawn = adaptive(_model(), jax.random.key(0), identity, policy=policy)
  index = np.asarray(drawn.tokens) @ V ** np.arange(N)[::-1]
  expected = law / law.sum() * len(index)
  counts = np.bincount(index, minlength=81)
  pooled = expected < 5
  observed = np.append(counts[~pooled], counts[pooled].sum())
  expected = np.append(expected[~pooled], expected[pooled].sum())
  keep = expected > 0
  assert scipy.stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4
  np.testing.assert_array_equal(np.argsort(drawn.step, axis=1), orders[index])
  assert len(np.unique(orders[index], axis=0)) > 1  # the path depends on the text


def test_details_are_the_model_s():
  """Log-probabilities along the realised order, by one full forward."""
  identity = np.tile(np.arange(N), (5, 1))
  drawn = adaptive(_model(), jax.random.key(1), identity, rule=SamplingRule(temperature=0.5))
  orders = np.argsort(drawn.step, axis=1).astype(np.int32)
  log_probs = np.asarray(jax.nn.log_softmax(_model()(drawn.tokens, orders)))
  tokens = np.take_along_axis(np.asarray(drawn.tokens), orders, axis=1)
  want = np.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
  got = np.take_along_axis(np.asarray(drawn.log_prob), orders, axis=1)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
  ranks = np.take_along_axis(np.asarray(drawn.rank), orders, axis=1)
  np.testing.assert_array_equal(ranks, (log_probs > want[..., None] + 1e-6).sum(axis=2))


@pytest.mark.parametrize('candidates', [0, 2])
def test_rows_with_prompts_and_ends_of_their_own(candidates):
  """Given and later tokens stay; each row is what it is without the others."""
  tokens = np.array([[0, 1, 2, 0], [2, 2, 1, 1], [1, 0, 0, 2]], np.int32)
  orders = np.array([[2, 0, 1, 3], [0, 1, 2, 3], [3, 1, 0, 2]], np.int32)
  first, end = np.array([1, 0, 2]), np.array([4, 2, 3])
  run = lambda rows: adaptive(
      _model(), jax.random.key(2), orders[rows], tokens=tokens[rows], prompt_length=first[rows],
      end=end[rows], rows=np.array(rows), candidates=candidates)
  together = run([0, 1, 2])
  filled = np.asarray(together.step) >= 0
  np.testing.assert_array_equal(filled.sum(axis=1), end - first)
  np.testing.assert_array_equal(np.asarray(together.tokens)[~filled], tokens[~filled])
  for row in range(3):
    assert sorted(together.step[row][filled[row]].tolist()) == list(range(filled[row].sum()))
    alone = run([row])
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
    np.testing.assert_array_equal(alone.step[0], together.step[row])
    assert set(np.flatnonzero(filled[row])) == set(orders[row, first[row]:end[row]])


def test_errors():
  encoder = MaskedEncoder(ModelConfig(
      architecture='encoder', target_injection='none', vocab_size=V, context_length=N, num_layers=1,
      num_heads=2, embed_dim=8), rngs=nnx.Rngs(0))
  orders = np.arange(N)[None]
  for model, options, message in (
      (encoder, {}, 'must be a decoder'),
      (_model(target_injection='none'), {}, 'must be a decoder'),
      (_model(), {'policy': 'confident'}, 'did you mean "confidence"'),
      (_model(), {'candidates': -1}, 'candidates=-1'), (_model(), {'prompt_length': 1}, 'tokens')):
    with pytest.raises(UserError, match=message):
      adaptive(model, jax.random.key(0), orders, **options)
