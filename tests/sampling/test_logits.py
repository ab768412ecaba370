"""The law of one draw: nucleus, temperature, forbidden ids, noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from aogpt_jax.errors import UserError
from aogpt_jax.sampling import (
  SamplingRule,
  gumbel_softmax,
  nucleus_mask,
  sample_categorical,
  transform,
)


@pytest.mark.parametrize('top_p', [0.0, 0.1, 0.5, 0.9, 0.95])
def test_nucleus_of_the_reference(golden, top_p):
  """Which tokens are kept, exactly."""
  arrays = golden('nucleus')
  np.testing.assert_array_equal(nucleus_mask(jnp.asarray(arrays['probs']), top_p),
                                arrays[f'kept/{top_p}'])


def test_nucleus_ties_and_edges():
  """Ties go to the lower id; a token whose cumulative mass is exactly p stays."""
  probs = jnp.array([0.25, 0.25, 0.25, 0.25])
  np.testing.assert_array_equal(nucleus_mask(probs, 0.5), [True, True, False, False])
  np.testing.assert_array_equal(nucleus_mask(probs, 0.0), [True, False, False, False])
  np.testing.assert_array_equal(nucleus_mask(probs[::-1] * jnp.array([0, 1, 1, 2]), 0.6),
                                [False, False, False, True])


def test_transform_leaves_plain_logits_alone(golden):
  """Temperature 1 and top_p 1 change no bit; a cumulative sum that rounds above 1 drops no id."""
  logits = jnp.log(jnp.asarray(golden('nucleus')['probs']))
  np.testing.assert_array_equal(transform(logits, SamplingRule()), logits)
  assert not nucleus_mask(jax.nn.softmax(logits), 1.0).all()  # what a nucleus of 1 would drop
  low = logits.astype(jnp.bfloat16)
  np.testing.assert_array_equal(transform(low, SamplingRule()), low.astype(jnp.float32))


def test_temperature_divides_before_the_nucleus():
  """softmax(logits / T), and the nucleus is that of the tempered law."""
  logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
  law = jax.nn.softmax(transform(logits, SamplingRule(temperature=0.5)))
  np.testing.assert_allclose(law, np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365, rtol=1e-5)
  # Cumulative: 0.5, 0.8, 0.95, 1 at T = 1 and 0.685, 0.932, 0.993, 1 at T = 0.5.
  kept = lambda temperature: np.isfinite(transform(logits, SamplingRule(temperature, 0.9))).tolist()
  assert kept(1.0) == [True, True, False, False]
  assert kept(0.5) == [True, False, False, False]


def test_greedy_keeps_the_first_of_the_most_probable():
  rule = SamplingRule(temperature=0.0)
  np.testing.assert_array_equal(transform(jnp.array([1.0, 3.0, 3.0, -1.0]), rule),
                                [-np.inf, 0.0, -np.inf, -np.inf])


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_ids_from_num_ids_on_are_impossible(temperature):
  """The padding of the vocabulary, even where its logit is the largest, also for the nucleus."""
  logits = jnp.array([1.0, 2.0, 0.0, 9.0, 9.0])
  for top_p in (1.0, 0.8):
    law = jax.nn.softmax(transform(logits, SamplingRule(temperature, top_p, num_ids=3)))
    assert (law[3:] == 0).all() and law[1] == law.max()
    np.testing.assert_allclose(law.sum(), 1, rtol=1e-6)
  assert np.isfinite(transform(logits, SamplingRule(1.0, 1.0, num_ids=3))[:3]).all()


def test_top_k_and_min_p():
  """The k most probable ids; ids within a share of the most probable; after the temperature."""
  logits = jnp.log(jnp.array([0.5, 0.1, 0.3, 0.06, 0.04]))
  law = lambda rule: transform(logits, SamplingRule(**rule))
  kept = lambda **rule: np.flatnonzero(np.isfinite(law(rule))).tolist()
  assert kept(top_k=2) == [0, 2] and kept(top_k=0) == kept(top_k=9) == [0, 1, 2, 3, 4]
  assert kept(min_p=0.2) == [0, 1, 2] and kept(min_p=0.19) == [0, 1, 2] and kept(min_p=1.0) == [0]
  assert kept(min_p=0.2, temperature=0.5) == [0, 2]  # shares are squared: 1, 0.04, 0.36, …
  assert kept(top_k=3, top_p=0.85) == [0]  # renormalised after top-k: 0.556, 0.889, …


def test_annealed_temperature():
  """Linear from the first step to the last, which may be greedy; constant by default."""
  rule = SamplingRule(temperature=1.0, final_temperature=0.5)
  steps = jnp.array([5, 3, 1])  # a row that is done early stays at its last
  temperatures = np.stack([rule.temperature_at(i, steps)[:, 0, 0] for i in range(5)])
  np.testing.assert_allclose(temperatures[:, 0], [1.0, 0.875, 0.75, 0.625, 0.5])
  np.testing.assert_allclose(temperatures[:3, 1], [1.0, 0.75, 0.5])
  assert SamplingRule().temperature_at(3, steps) is None
  logits = jnp.array([0.0, 1.0, 2.0])
  np.testing.assert_allclose(
      jax.nn.softmax(transform(logits, rule, jnp.float32(0.5))),
      jax.nn.softmax(logits / 0.5), rtol=1e-6)
  last = transform(logits, rule, jnp.float32(0.0))
  np.testing.assert_array_equal(jax.nn.softmax(last), [0, 0, 1])


def test_gumbel_softmax_draws_one_hot_and_has_the_gradient_of_the_softmax():
  """Frequencies of softmax(logits); the gradient is that of the relaxed draw."""
  logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
  keys = jax.random.split(jax.random.key(0), 20_000)
  drawn = np.asarray(jax.vmap(lambda k: gumbel_softmax(k, logits, 0.7))(keys))
  np.testing.assert_allclose(np.sort(drawn, axis=1), np.tile([0, 0, 1.0], (20_000, 1)), atol=1e-6)
  assert scipy.stats.chisquare(drawn.sum(axis=0), np.array([0.5, 0.3, 0.2]) * 20_000).pvalue > 1e-4
  key, weights = jax.random.key(3), jnp.array([1.0, -2.0, 0.5])
  noise = jax.random.gumbel(key, (3,), jnp.float32, mode='high')
  soft = lambda x: (jax.nn.softmax((x + noise) / 0.7) * weights).sum()
  hard = lambda x: (gumbel_softmax(key, x, 0.7) * weights).sum()
  np.testing.assert_allclose(jax.grad(hard)(logits), jax.grad(soft)(logits), rtol=1e-5)


def test_draw_follows_softmax():
  """Chi-square over 5 ids; -inf is never drawn."""
  probs = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
  keys = jax.random.split(jax.random.key(0), 20_000)
  logits = jnp.log(jnp.asarray(probs))
  drawn = np.asarray(jax.jit(jax.vmap(lambda k: sample_categorical(k, logits)))(keys))
  counts = np.bincount(drawn, minlength=5)
  assert drawn.dtype == np.int32 and counts[4] == 0
  assert scipy.stats.chisquare(counts[:4], probs[:4] * len(drawn)).pvalue > 1e-4


def _tail_hits(seed, num_draws, num_tail, gap):
  """How many of the draws take one of `num_tail` ids, each exp(-gap) as probable as the head."""
  logits = jnp.zeros(num_tail + 1).at[0].set(gap)
  keys = jax.random.split(jax.random.key(seed), num_draws)
  in_tail = lambda key: sample_categorical(key, logits) > 0
  return int(jax.jit(lambda keys: jax.lax.map(in_tail, keys).sum())(keys))


def test_noise_has_the_long_tail(monkeypatch):
  """`sample_categorical` asks for noise beyond 15.94, where 23 bits end; the law: the slow test."""
  modes, gumbel = [], jax.random.gumbel
  monkeypatch.setattr(jax.random, 'gumbel', lambda *args, mode=None, **kwargs: (
      modes.append(mode), gumbel(*args, mode=mode, **kwargs))[1])
  sample_categorical(jax.random.key(0), jnp.zeros(4))
  assert modes == ['high']


@pytest.mark.slow
def test_tail_has_its_mass():
  """50,000 ids that share 1e-3: 20 of 20,000 draws; with noise that ends at 15.94 hardly one."""
  gap = np.log(50_000 * 999)
  assert 8 <= _tail_hits(0, 20_000, 50_000, gap) <= 36


@pytest.mark.parametrize(('rule', 'message'), [
    (SamplingRule(temperature=-0.1), 'temperature=-0.1: must be finite and at least 0'),
    (SamplingRule(top_p=1.1), r'top_p=1.1: must be in \[0, 1\]'),
    (SamplingRule(num_ids=-1), 'num_ids=-1'), (SamplingRule(top_k=-1), 'top_k=-1'),
    (SamplingRule(min_p=1.5), 'min_p=1.5'),
    (SamplingRule(final_temperature=-0.5), 'final_temperature=-0.5: .*or -1')])
def test_errors(rule, message):
  with pytest.raises(UserError, match=message):
    rule.validate()
  assert SamplingRule().validate() == SamplingRule()
