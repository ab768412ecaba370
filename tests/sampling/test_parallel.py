"""Parallel generation with a cache against full forward passes without one."""

import functools
import itertools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from aogpt_jax import interop
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, ModelConfig
from aogpt_jax.sampling import (
  SamplingRule,
  decode_logits,
  generate,
  generate_record,
  reveal_counts,
)
from aogpt_jax.sampling.parallel import count_items, known_counts

ENCODINGS = ('learned', 'target_rotary')
N, V = 9, 7


@functools.cache
def _model(encoding='learned', **changes):
  """Shorter texts than the context, weights large enough that the context matters."""
  return AOGPT(ModelConfig(**(dict(
      vocab_size=V, context_length=N + 2, num_layers=2, num_heads=2, embed_dim=16, condition_dim=8,
      position_encoding=encoding, rotary_base=20.0, use_bias=True, init_std=0.5,
      gate_init=0.5) | changes)), rngs=nnx.Rngs(1))


@functools.cache
def _full(encoding='learned', **changes):
  return jax.jit(_model(encoding, **changes).__call__)


def _batch(rows, seed=0):
  rng = np.random.default_rng(seed)
  return (rng.integers(0, V, (rows, N)).astype(np.int32),
          rng.permuted(np.tile(np.arange(N, dtype=np.int32), (rows, 1)), axis=1))


@pytest.mark.parametrize('name', ['decode_linear', 'decode_ragged', 'decode_conditional'])
def test_decoding_of_the_reference(golden, name):
  """Logits of every step of the reference's own parallel decoder."""
  arrays = golden(name)
  params = {k.removeprefix('param/'): a for k, a in arrays.items() if k.startswith('param/')}
  model = interop.from_reference_arrays(json.loads(str(arrays['config'])), params)
  prompt = arrays.get('prompt_length', 0)
  # The reference's prompt items see the later ones; ours see the earlier, as in training.
  got = decode_logits(model, arrays['tokens'], arrays['orders'], arrays['groups'].tolist(),
                      int(prompt), prefill='reversed')
  np.testing.assert_allclose(got, arrays['logits'], rtol=0, atol=1e-4)


def _logits_by_full_forwards(forward, tokens, orders, groups, first):
  """(B, n - first, V): each token of a group is made the immediate successor of its context.

  For the token of step j in a group that starts at m, σ(m) and σ(j) change places; row m of the
  logits of that order is conditioned on the steps before m alone and targets σ(j).
  """
  swapped, index = [], []
  start = first
  for size in groups:
    for j in range(start, start + size):
      order = orders.copy()
      order[:, [start, j]] = order[:, [j, start]]
      swapped.append(order)
      index.append(start)
    start += size
  logits = forward(np.tile(tokens, (len(index), 1)), np.concatenate(swapped))
  logits = np.asarray(logits).reshape(len(index), *orders.shape, -1)
  return np.stack([logits[i, :, m] for i, m in enumerate(index)], axis=1)


@pytest.mark.parametrize('encoding', ENCODINGS)
@pytest.mark.parametrize(('groups', 'prompt_length'), [
    ([1] * 9, 0), ([2, 2, 2, 2, 1], 0), ([5, 4], 0), ([1, 4, 2, 1, 1], 0), ([9], 0),
    ([1] * 5, 4), ([3, 1, 2], 3), ([1, 5], 3)])
def test_cached_steps_equal_full_forwards(encoding, groups, prompt_length):
  """The cache after any history of groups, with and without a prompt, changes no logit."""
  tokens, orders = _batch(3)
  got = decode_logits(_model(encoding), tokens, orders, groups, prompt_length)
  want = _logits_by_full_forwards(_full(encoding), tokens, orders, groups, prompt_length)
  chex.assert_shape(got, (3, N - prompt_length, V))
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
  assert want.std() > 0.5


@pytest.mark.parametrize('changes', [
    dict(target_injection='input', norm='layernorm', qk_norm=False, tie_embeddings=True,
         head_bias=False),  # σ-GPT
    dict(target_injection='every_block'), dict(target_injection='every_block_distinct')],
    ids=lambda changes: changes['target_injection'])
def test_cached_steps_of_other_injections(changes):
  """The tables that a generation call computes once are those of the full forward pass."""
  tokens, orders = _batch(3)
  got = decode_logits(_model(**changes), tokens, orders, [2, 3, 1], 3)
  want = _logits_by_full_forwards(_full(**changes), tokens, orders, [2, 3, 1], 3)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_generate_keeps_the_prompt_and_each_row_to_itself():
  """Given tokens come back; a row is the same alone and next to any other rows."""
  tokens, orders = _batch(3)
  key, prompt = jax.random.key(5), 4
  run = lambda t, o: np.asarray(generate(_model(), key, o, steps=3, tokens=t, prompt_length=prompt))
  whole = run(tokens, orders)
  given = np.take_along_axis(whole, orders, axis=1)[:, :prompt]
  np.testing.assert_array_equal(given, np.take_along_axis(tokens, orders, axis=1)[:, :prompt])
  np.testing.assert_array_equal(run(tokens[:1], orders[:1]), whole[:1])
  other_tokens, other_orders = _batch(3, seed=1)
  other_tokens[1], other_orders[1] = tokens[1], orders[1]
  np.testing.assert_array_equal(run(other_tokens, other_orders)[1], whole[1])
  # Tokens of the holes are not read.
  hidden = tokens.copy()
  np.put_along_axis(hidden, orders[:, prompt:], 0, axis=1)
  np.testing.assert_array_equal(run(hidden, orders), whole)


@pytest.mark.parametrize(('steps', 'schedule'), [
    *(pytest.param(steps, 'linear', marks=pytest.mark.slow) for steps in (0, 3)), (3, 'cosine')])
def test_rows_with_prompts_and_ends_of_their_own(steps, schedule):
  """Given tokens and those behind the end stay; each row is what it is by itself."""
  tokens, orders = _batch(4)
  first, end = np.array([4, 0, 7, 2]), np.array([9, 6, 8, 2])
  def run(rows):
    most = int((end - first)[rows].max())
    return generate_record(
        _model(), jax.random.key(3), orders[rows], steps=min(steps, most), schedule=schedule,
        tokens=tokens[rows], prompt_length=first[rows], end=end[rows], rows=np.array(rows))
  together = run([0, 1, 2, 3])
  for row in range(4):
    filled = np.zeros(N, bool)
    filled[orders[row, first[row]:end[row]]] = True
    np.testing.assert_array_equal(together.step[row] >= 0, filled)
    np.testing.assert_array_equal(np.isnan(together.log_prob[row]), ~filled)
    np.testing.assert_array_equal(np.asarray(together.tokens)[row, ~filled], tokens[row, ~filled])
    alone = run([row])
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
    np.testing.assert_array_equal(alone.step[0], together.step[row])
    np.testing.assert_allclose(alone.log_prob[0], together.log_prob[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize('steps', [64, 512])
def test_work_grows_with_the_tokens_and_not_with_the_steps(steps):
  """n = 1024: at most 2n - steps real items a row; rows of their own sizes, by hand."""
  known = known_counts('linear', np.array([0]), np.array([1024]), steps)
  real, computed = count_items(known)
  assert 2 * 1024 - steps - 1024 // steps <= real <= 2 * 1024 - steps
  assert computed == steps * (2 * (1024 // steps) - 1)
  # Two given and groups 1, 2, 2: 2 + (1 + 2 + 2) + 1; one token given, two filled in turn: 1 + 2.
  known = np.array([[2, 3, 5, 7], [1, 2, 3, 3]])
  assert count_items(known) == (8 + 3, 2 * (2 + 3 * 3))


def test_annealed_rows_do_not_depend_on_each_other():
  """The temperature follows the row's own steps; the last step of each is greedy."""
  tokens, orders = _batch(2)
  rule = SamplingRule(temperature=1.0, final_temperature=0.0)
  run = lambda rows, first: generate_record(
      _model(), jax.random.key(4), orders[rows], rule=rule, tokens=tokens[rows],
      prompt_length=np.array(first), rows=np.array(rows))
  together, alone = run([0, 1], [2, 6]), run([1], [6])
  np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])
  last = orders[np.arange(2), -1]
  np.testing.assert_array_equal(np.asarray(together.rank)[np.arange(2), last], 0)


def test_rows_and_keys_draw_their_own_tokens():
  """16 equal rows differ from each other, and from those of another key."""
  orders = np.tile(np.arange(N), (16, 1))
  run = lambda seed: np.asarray(generate(_model(init_std=0.02), jax.random.key(seed), orders,
                                         steps=3))
  rows = np.concatenate([run(0), run(1)])
  assert len(np.unique(rows, axis=0)) == 32
  assert rows.min() >= 0 and rows.max() < V
  # Every column varies by itself: no key is used for two tokens.
  assert max((rows[:, i] == rows[:, j]).mean() for i, j in itertools.combinations(range(N), 2)) < .6


def test_a_given_text_comes_back_whole():
  """prompt_length = n: nothing to generate."""
  tokens, orders = _batch(2)
  np.testing.assert_array_equal(
      generate(_model(), jax.random.key(0), orders, tokens=tokens, prompt_length=N), tokens)


SMALL = dict(vocab_size=3, context_length=4, gate_init=0.0, init_std=0.35)


@pytest.mark.parametrize(('groups', 'calls', 'encoding'), [
    ((1, 1, 1, 1), 6, 'target_rotary'), ((2, 2), 3, 'learned'),
    pytest.param((1, 1, 1, 1), 6, 'learned', marks=pytest.mark.slow),
    pytest.param((2, 2), 3, 'target_rotary', marks=pytest.mark.slow)])
def test_samples_follow_the_law_of_the_model(encoding, groups, calls):
  """Chi-square over 24 orders x 81 sequences against their probabilities, 16,800 draws a call.

  One token a step: Π p(x_σ(t) | x_σ(<t), σ(t)). Two: independent given the earlier steps.
  """
  sequences = np.array(list(itertools.product(range(3), repeat=4)), np.int32)
  all_orders = np.array(list(itertools.permutations(range(4))), np.int32)
  tokens, orders = np.tile(sequences, (24, 1)), np.repeat(all_orders, 81, axis=0)
  logits = _logits_by_full_forwards(_full(encoding, **SMALL), tokens, orders, groups, 0)
  log_probs = np.take_along_axis(
      logits - scipy.special.logsumexp(logits, axis=-1, keepdims=True),
      np.take_along_axis(tokens, orders, axis=1)[..., None], axis=-1)[..., 0]
  law = np.exp(log_probs.sum(axis=-1, dtype=np.float64)) / 24
  np.testing.assert_allclose(law.sum(), 1, rtol=1e-5)

  which = np.tile(np.arange(24), 700)
  observed = np.zeros(24 * 81)
  for seed in range(calls):
    drawn = np.asarray(generate(_model(encoding, **SMALL), jax.random.key(seed),
                                all_orders[which], steps=len(groups)))
    observed += np.bincount(which * 81 + drawn @ [27, 9, 3, 1], minlength=24 * 81)
  expected = law * observed.sum()
  rare = expected < 5  # pooled: the chi-square law needs a few in every cell
  pool = lambda x: np.append(x[~rare], x[rare].sum())
  expected *= observed.sum() / pool(expected).sum()  # float rounding; chisquare insists
  assert scipy.stats.chisquare(pool(observed), pool(expected)).pvalue > 1e-4
  assert (~rare).sum() > 300


@pytest.mark.parametrize('prompt_length', [0, 3])
def test_temperature_0_is_greedy_decoding(prompt_length):
  """One token a step by full forwards over everything known, the most probable each time."""
  tokens, orders = _batch(4, seed=2)
  got = generate(_model('target_rotary'), jax.random.key(0), orders,
                 rule=SamplingRule(temperature=0.0), tokens=tokens, prompt_length=prompt_length)
  want = tokens.copy()
  np.put_along_axis(want, orders[:, prompt_length:], 0, axis=1)
  rows = np.arange(4)
  for t in range(prompt_length, N):
    want[rows, orders[:, t]] = _full('target_rotary')(want, orders)[:, t].argmax(axis=-1)
  np.testing.assert_array_equal(got, want)


def test_greedy_steps_follow_the_schedule():
  """Cosine, 4 steps: the tokens of one step do not see each other, those of earlier steps do."""
  tokens, orders = _batch(4, seed=3)
  got = generate(_model(), jax.random.key(0), orders, steps=4, schedule='cosine',
                 rule=SamplingRule(temperature=0.0))
  groups = np.diff([0, *reveal_counts('cosine', N, 4)]).tolist()
  logits = _logits_by_full_forwards(_full(), np.asarray(got), orders, groups, 0)
  np.testing.assert_array_equal(np.take_along_axis(np.asarray(got), orders, axis=1),
                                logits.argmax(axis=-1))


def test_padding_ids_are_never_drawn():
  """A head that prefers id 6 above all; num_ids = 5."""
  model = nnx.clone(_model())
  model.head.bias[...] = jnp.zeros(V).at[6].set(20.0)
  orders = _batch(16)[1]
  free = generate(model, jax.random.key(0), orders, steps=3)
  assert (np.asarray(free) == 6).mean() > 0.9
  drawn = generate(model, jax.random.key(0), orders, steps=3, rule=SamplingRule(num_ids=5))
  assert set(np.unique(drawn)) <= set(range(5)) and len(np.unique(drawn)) == 5


@pytest.mark.parametrize(('changes', 'message'), [
    ({'orders': [[0, 1, 1]]}, r'every row must be a permutation of 0..2'),
    ({'orders': [list(range(N + 3))]}, f'length {N + 3}: the context_length of this model is'),
    ({'steps': 4}, 'steps=4: must be in 1..3'),
    ({'schedule': 'cosin'}, 'did you mean "cosine"'),
    ({'prompt_length': 1}, r'prompt_length=\[1\]: needs `tokens`'),
    ({'prompt_length': 4}, r'prompt_length=\[4\]: must be in 0..3'),
    ({'rule': SamplingRule(top_p=2.0)}, 'top_p=2.0')])
def test_generate_errors(changes, message):
  arguments = {'orders': [[2, 0, 1]]} | changes
  with pytest.raises(UserError, match=message):
    generate(_model(), jax.random.key(0), np.array(arguments.pop('orders')), **arguments)


@pytest.mark.parametrize(('groups', 'prompt_length'), [([1, 1], 0), ([2, 2], 0), ([3, 0], 0),
                                                       ([3], 1)])
def test_groups_that_do_not_fit(groups, prompt_length):
  tokens, orders = np.zeros((1, 3), np.int32), np.array([[2, 0, 1]])
  with pytest.raises(UserError, match=f'must be positive and sum to {3 - prompt_length}'):
    decode_logits(_model(), tokens, orders, groups, prompt_length)
