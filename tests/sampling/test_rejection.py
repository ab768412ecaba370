"""σ-GPT's token rejection sampling: progress, prompts, rows of their own, and that it is biased."""

import functools
import itertools

import jax
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from aogpt_jax import objective
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, ModelConfig
from aogpt_jax.sampling import SamplingRule, token_rejection

V, N = 3, 4


@functools.cache
def _model(**changes):
  return AOGPT(ModelConfig(**(dict(
      vocab_size=V, context_length=N, num_layers=2, num_heads=2, embed_dim=16, condition_dim=8,
      init_std=0.4, gate_init=0.5) | changes)), rngs=nnx.Rngs(1))


def _orders(rows):
  return np.tile(np.arange(N), (rows, 1))


def test_progress_prompt_and_rows():
  """At least one token a round, two calls each; given tokens stay; a row is what it is alone."""
  tokens = np.random.default_rng(0).integers(0, V, (20, N)).astype(np.int32)
  run = lambda rows: token_rejection(_model(), jax.random.key(0), _orders(rows), num_orders=2,
                                     tokens=tokens[:rows], prompt_length=1)
  found = run(20)
  np.testing.assert_array_equal(found.tokens[:, 0], tokens[:, 0])
  assert found.calls.max() <= 2 * (N - 1) and found.calls.min() >= 2
  np.testing.assert_array_equal(found.accepted, N - 1)
  assert (found.drafted >= found.accepted).all() and found.drafted.max() > N - 1
  np.testing.assert_array_equal(run(3).tokens, found.tokens[:3])
  assert len(np.unique(found.tokens, axis=0)) > 5


def test_one_token_is_drawn_from_its_law():
  """With one open position nothing is approximate: chi-square against the model."""
  tokens = np.tile(np.array([[0, 2, 1, 0]], np.int32), (20_000, 1))
  found = token_rejection(_model(), jax.random.key(1), _orders(20_000), tokens=tokens,
                          prompt_length=3)
  texts = np.array([[0, 2, 1, v] for v in range(V)], np.int32)
  nll = np.asarray(objective.token_nll(_model(), texts, _orders(V)), np.float64)[:, -1]
  counts = np.bincount(np.asarray(found.tokens)[:, 3], minlength=V)
  assert scipy.stats.chisquare(counts, np.exp(-nll) / np.exp(-nll).sum() * 20_000).pvalue > 1e-4
  assert (np.asarray(found.calls) == 2).all()


@pytest.mark.slow
def test_it_is_not_lossless():
  """20,000 texts are far from the average over orders of the model's law, as the notes say."""
  sequences = np.array(list(itertools.product(range(V), repeat=N)), np.int32)
  orders = np.array(list(itertools.permutations(range(N))), np.int32)
  nll = objective.token_nll(_model(), np.tile(sequences, (24, 1)), np.repeat(orders, 81, axis=0))
  law = np.exp(-np.asarray(nll, np.float64).sum(axis=1)).reshape(24, 81).mean(axis=0)
  found = token_rejection(_model(), jax.random.key(2), _orders(20_000), num_orders=3)
  index = np.asarray(found.tokens) @ V ** np.arange(N)[::-1]
  counts = np.bincount(index, minlength=81)
  assert 0.5 * np.abs(counts / counts.sum() - law).sum() > 0.03  # 0.02 is the noise


def test_errors():
  with pytest.raises(UserError, match='num_orders=0: must be at least 1'):
    token_rejection(_model(), jax.random.key(0), _orders(1), num_orders=0)
  with pytest.raises(UserError, match='must be a decoder that is told its target'):
    token_rejection(_model(target_injection='none'), jax.random.key(0), _orders(1))
  with pytest.raises(UserError, match='top_p=2.0'):
    token_rejection(_model(), jax.random.key(0), _orders(1), rule=SamplingRule(top_p=2.0))
