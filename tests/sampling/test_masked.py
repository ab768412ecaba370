"""The encoder's sampler draws from the law that its conditionals define."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from aogpt_jax import objective, orders as orders_lib
from aogpt_jax.errors import UserError
from aogpt_jax.model import MaskedEncoder, ModelConfig
from aogpt_jax.sampling import SamplingRule, ancestral, generate, masked

V, N = 3, 4
SEQUENCES = np.array(list(itertools.product(range(V), repeat=N)), np.int32)  # (81, 4)


@functools.cache
def _model(**changes):
  return MaskedEncoder(ModelConfig(**(dict(
      architecture='encoder', target_injection='none', vocab_size=V, context_length=N, num_layers=1,
      num_heads=2, embed_dim=8, init_std=0.35) | changes)), rngs=nnx.Rngs(2))


def _law_of_turns(turns):
  """(81,) probability of every sequence: product over steps, independent within a step."""
  logits = jax.jit(_model().__call__)
  law = np.ones(len(SEQUENCES))
  for step in range(turns.max() + 1):
    shown = np.tile(turns >= step, (len(SEQUENCES), 1))
    probs = np.asarray(jax.nn.softmax(logits(SEQUENCES, shown)), np.float64)
    picked = np.take_along_axis(probs, SEQUENCES[..., None], axis=2)[..., 0]
    law *= picked[:, turns == step].prod(axis=1)
  return law


def _p_value(tokens, law):
  index = np.asarray(tokens) @ V ** np.arange(N)[::-1]
  assert law.min() * len(index) > 5
  return scipy.stats.chisquare(np.bincount(index, minlength=V**N), law * len(index)).pvalue


def test_one_reveal_a_step_draws_from_the_enumerated_law():
  """T = n in uniform orders, 200,000 draws, chi-square over all 81 sequences.

  The law is the average over the 24 orders of the chain rule along each, from `token_nll`.
  """
  orders = np.array(list(itertools.permutations(range(N))), np.int32)
  nll = objective.token_nll(_model(), np.tile(SEQUENCES, (24, 1)), np.repeat(orders, 81, axis=0))
  law = np.exp(-np.asarray(nll, np.float64).sum(axis=1)).reshape(24, 81).mean(axis=0)
  np.testing.assert_allclose(law.sum(), 1, atol=1e-5)
  drawn = orders_lib.make('uniform').sample(jax.random.key(5), 200_000, N)
  tokens = generate(_model(), jax.random.key(6), drawn, steps=N)
  assert _p_value(tokens, law / law.sum()) > 1e-4
  assert _p_value(tokens, np.full(81, 1 / 81)) < 1e-10  # the law is far from flat


@pytest.mark.slow
@pytest.mark.parametrize('schedule', ['linear', 'cosine'])
def test_ancestral_sampling_in_fewer_steps_draws_from_its_law(schedule):
  """T = 2: each token's step is drawn by itself; all 16 assignments enumerated."""
  second = 0.5 if schedule == 'linear' else np.cos(np.pi / 4)  # still masked after step 1
  law = np.zeros(81)
  for turns in itertools.product((0, 1), repeat=N):
    probability = np.prod([second if turn else 1 - second for turn in turns])
    law += probability * _law_of_turns(np.unique(turns, return_inverse=True)[1])
  tokens, _ = ancestral(_model(), jax.random.key(7), 100_000, N, 2, schedule=schedule)
  assert _p_value(tokens, law / law.sum()) > 1e-4


def test_skipping_empty_steps_changes_the_cost_and_no_token():
  """64 steps for 4 tokens: at most 4 passes, and the same tokens as with all 64."""
  run = lambda skip: ancestral(_model(), jax.random.key(8), 6, N, 64, skip_empty_steps=skip)
  (slow, all_passes), (fast, few_passes) = run(False), run(True)
  np.testing.assert_array_equal(slow, fast)
  assert few_passes <= 4 < all_passes <= 64


def test_a_row_depends_on_the_key_and_its_number_alone():
  """The first rows of a larger batch, whatever the groups of the other rows."""
  few, _ = ancestral(_model(), jax.random.key(9), 3, N, 3)
  many, _ = ancestral(_model(), jax.random.key(9), 40, N, 3)
  np.testing.assert_array_equal(few, many[:3])
  assert len({row.tobytes() for row in np.asarray(many)}) > 5


def test_empty_steps_and_groups_by_hand():
  """Steps of a row that reveal nothing are dropped; the largest group of any row is rounded up."""
  turns = np.array([[0, 1, -1, 1], [-1, 0, 1, 1]], np.int32)
  gaps = np.array([[5, -1, 2, 5], [7, 3, 0, 9]], np.int32)
  np.testing.assert_array_equal(masked._without_empty_steps(gaps), [[1, -1, 0, 1], [2, 1, 0, 3]])
  assert masked._largest_group(turns) == 2
  assert masked._largest_group(np.array([[0, 0, 0, 1], [0, 1, 2, 3]])) == 4  # 3, rounded up


def test_given_tokens_stay_and_the_rule_holds():
  """A prompt is never changed; ids that may not be drawn are not; greedy is the argmax."""
  model = _model()
  orders = orders_lib.make('uniform').sample(jax.random.key(0), 50, N)
  tokens = jnp.full((50, N), 2, jnp.int32)
  out = generate(model, jax.random.key(1), orders, steps=2, tokens=tokens, prompt_length=2,
                 rule=SamplingRule(num_ids=2))
  rows = np.arange(50)[:, None]
  assert (np.asarray(out)[rows, orders[:, :2]] == 2).all()
  assert (np.asarray(out)[rows, orders[:, 2:]] < 2).all()
  greedy = generate(model, jax.random.key(1), orders[:1], steps=1,
                    rule=SamplingRule(temperature=0.0))
  want = model(np.zeros((1, N), np.int32), np.ones((1, N), bool)).argmax(axis=-1)
  chex.assert_trees_all_equal(greedy, want.astype(jnp.int32))


@pytest.mark.parametrize(('options', 'message'), [
    (dict(steps=0), 'steps=0: must be an integer of at least 1'),
    (dict(batch_size=-1), 'batch_size=-1: must be an integer'),
    (dict(length=5), r'length=5: must be in 1..4'),
    (dict(schedule='sine'), "schedule='sine'")])
def test_impossible_options(options, message):
  with pytest.raises(UserError, match=message):
    ancestral(_model(), jax.random.key(0), **(dict(batch_size=1, length=4, steps=2) | options))
