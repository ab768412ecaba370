"""The law of one draw: nucleus, temperature, forbidden ids, noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from aogpt_jax.errors import UserError
from aogpt_jax.sampling import (
  SamplingRule,
  gumbel_softmax,
  nucleus_mask,
  sample_categorical,
  transform,
)
from aogpt_jax.sampling.logits import _noise


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
  assert nucleus_mask(probs * jnp.array([1, 0, 1, 0]), 0.6).all()  # all of it is below p


# Level 0 of `conftest` compiles faster, and computes a billion values of noise slower.
OPTIMISED = {'xla_backend_optimization_level': 1}
TOP_P = (0.0, 1e-6, 0.1, 0.25, 0.5, 0.9, 0.95, 0.999)


def _sorted_form(probs, top_p):
  """The nucleus by a sort, in float64: ids by descending probability, their cumulative mass, mask.

  The lowest ids go first among equals; probs: (V,) float32.
  """
  ranking = np.argsort(-probs, kind='stable')
  mass = np.cumsum(probs[ranking], dtype=np.float64)
  kept = np.zeros(len(probs), bool)
  kept[ranking] = mass <= np.float32(top_p)
  kept[ranking[0]] = True
  return ranking, mass, kept


def _nuclei(rows):
  """[top_p, row, id] of (rows, V), with both axes under vmap."""
  over_rows = jax.vmap(nucleus_mask, (0, None))
  return np.asarray(jax.jit(jax.vmap(over_rows, (None, 0)))(rows, jnp.float32(TOP_P)))


@pytest.mark.parametrize('size', [1, 5, 130, 4096, 50304])
def test_nucleus_is_that_of_the_sorted_form_where_sums_are_exact(size):
  """Multiples of 2^-12, most of them tied, many zero; one-hot; laws as flat as they get."""
  rng = np.random.default_rng(size)
  weights = [rng.dirichlet(np.full(size, concentration)) for concentration in (0.02, 0.5, 50)]
  one_hot, flat = np.eye(1, size, size // 2)[0], np.diff(np.linspace(0, 4096, size + 1).astype(int))
  counts = np.stack([*(rng.multinomial(4096, w) for w in weights), 4096 * one_hot, flat])
  rows = (counts / 4096).astype(np.float32)
  for got_rows, top_p in zip(_nuclei(rows), TOP_P):
    for got, row in zip(got_rows, rows):
      np.testing.assert_array_equal(got, _sorted_form(row, top_p)[-1], err_msg=f'{top_p=}')


@pytest.mark.parametrize('size', [5, 130, 4096, 50304])
def test_nucleus_is_that_of_the_sorted_form_up_to_rounding(size):
  """The first ids of the sorted form; how many: as many as fit, to 1e-5 of mass."""
  rng = np.random.default_rng(size)
  sharpness = np.array([[0.0], [0.01], [0.3], [1.0], [3.0], [10.0], [100.0]])
  rows = np.array(jax.nn.softmax(jnp.float32(sharpness * rng.normal(size=size))))
  for got_rows, top_p in zip(_nuclei(rows), TOP_P):
    for got, row in zip(got_rows, rows):
      ranking, mass, _ = _sorted_form(row, top_p)
      count = got.sum()
      assert got[ranking[:count]].all() and count >= 1
      assert count == 1 or mass[count - 1] <= top_p + 1e-5
      assert count == size or mass[count] > top_p - 1e-5


def test_nucleus_of_a_row_is_its_own():
  """Whatever stands next to it: rows whose searches end early wait for the others."""
  rng = np.random.default_rng(0)
  rows = jnp.float32(rng.multinomial(4096, np.full(300, 1 / 300), size=4) / 4096)
  rows = rows.at[0].set(jnp.eye(300)[7]).at[1].set(jax.nn.softmax(3 * rng.normal(size=300)))
  together = nucleus_mask(rows.reshape(2, 2, 300), 0.9).reshape(4, 300)
  for row, got in zip(rows, together):
    np.testing.assert_array_equal(got, nucleus_mask(row, 0.9))


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


def _draws(logits, num_draws, seed=0):
  """(num_draws, ...) ids drawn from logits (..., V), by as many keys."""
  keys = jax.random.split(jax.random.key(seed), num_draws).reshape(-1, 1000)
  draw = jax.vmap(sample_categorical, (0, None))
  drawn = jax.jit(lambda keys: jax.lax.map(lambda k: draw(k, logits), keys),
                  compiler_options=OPTIMISED)(keys)
  assert drawn.dtype == jnp.int32
  return np.asarray(drawn).reshape(num_draws, *logits.shape[:-1])


def _p_value(drawn, probs):
  """Chi-square of ids (n,) against probabilities (V,); ids expected fewer than 5 times are one."""
  counts, expected = np.bincount(drawn, minlength=len(probs)), probs / probs.sum() * len(drawn)
  assert len(counts) == len(probs) and counts[probs == 0].sum() == 0
  rare = expected < 5
  if rare.any():
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
  return scipy.stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


def _uneven_logits(*shape):
  """Whose groups of 128 differ in their mean, their spread and their size."""
  rng = np.random.default_rng(shape)
  where = np.arange(shape[-1]) // 128
  return jnp.float32(rng.normal(size=shape) * (where % 3 + 0.5) - where)


@pytest.mark.parametrize('size', [5, 100, 128, 129, 300, 640])
def test_draw_follows_softmax(size):
  """Chi-square over the ids, also where the last group of them is short."""
  logits = _uneven_logits(size)
  drawn = _draws(logits, 20_000)
  assert _p_value(drawn, scipy.special.softmax(np.float64(logits))) > 1e-4


def test_impossible_ids_are_never_drawn():
  """One by one, and a whole group of them at the start, in the middle and in a short end."""
  logits = _uneven_logits(700).at[::3].set(-jnp.inf)
  for first in (0, 256, 640):
    logits = logits.at[first:first + 128].set(-jnp.inf)
  drawn = _draws(logits, 20_000)
  assert _p_value(drawn, scipy.special.softmax(np.float64(logits))) > 1e-4
  only = jnp.full((2, 700), -jnp.inf).at[[0, 1], [5, 699]].set([-80.0, 3.0])
  np.testing.assert_array_equal(_draws(only, 1000), [[5, 699]] * 1000)


def test_rows_are_drawn_each_from_its_law_and_independently():
  """Logits (2, 3, V): six laws of one key."""
  logits = _uneven_logits(2, 3, 200)
  drawn = _draws(logits, 20_000)
  for i, j in np.ndindex(2, 3):
    assert _p_value(drawn[:, i, j], scipy.special.softmax(np.float64(logits[i, j]))) > 1e-4
  pairs = _draws(jnp.zeros((2, 3)), 20_000) @ [3, 1]
  assert _p_value(pairs, np.ones(9)) > 1e-4


def test_low_precision_logits_are_cast():
  """The draws are those of the same numbers in float32."""
  logits = _uneven_logits(300).astype(jnp.bfloat16)
  np.testing.assert_array_equal(_draws(logits, 1000), _draws(logits.astype(jnp.float32), 1000))


def test_noise_has_the_long_tail(monkeypatch):
  """Both draws of `sample_categorical` ask for noise beyond 15.94, where 23 bits end."""
  modes, gumbel = [], jax.random.gumbel
  monkeypatch.setattr(jax.random, 'gumbel', lambda *args, mode=None, **kwargs: (
      modes.append(mode), gumbel(*args, mode=mode, **kwargs))[1])
  sample_categorical(jax.random.key(0), jnp.zeros(4))
  assert modes == ['high', 'high']


def test_noise_ends_where_it_should():
  """16 of 2^27 values lie beyond 15.94; noise of 23 bits has none there."""
  beyond = lambda key: (_noise(key, jnp.zeros(2**20)) > 15.943).sum()
  keys = jax.random.split(jax.random.key(0), 2**7)
  count = jax.jit(lambda keys: jax.lax.map(beyond, keys).sum(), compiler_options=OPTIMISED)(keys)
  assert 4 <= count <= 34


@pytest.mark.slow
def test_tail_has_its_mass():
  """50,000 ids share 1e-3: 2,000 of 2,000,000 draws, within 5 % (2.2 sigma; a fixed seed), evenly.

  In groups of 128 coarse noise passes, too: a group of the tail is but 12.9 below the head.
  """
  logits = jnp.zeros(50_001).at[0].set(np.log(50_000 * 999))
  drawn = _draws(logits, 2_000_000)
  tail = drawn[drawn > 0] - 1
  assert 1900 <= len(tail) <= 2100
  assert _p_value(tail // 1000, np.ones(50)) > 1e-4


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
