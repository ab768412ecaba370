"""Speculative generation: its law against enumeration, its cache against a full forward pass."""

import concurrent.futures
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from flax import nnx

from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, MaskedEncoder, ModelConfig, make_items
from aogpt_jax.sampling import SamplingRule, generate, speculative, transform

# The package's name `speculative` is the function.
module = importlib.import_module('aogpt_jax.sampling.speculative')

SEQUENCES = np.array(list(itertools.product(range(3), repeat=4)), np.int32)  # all 81
ORDER = np.array([2, 0, 3, 1], np.int32)
BATCH = 8192
BATCHES, FEW = 24, 6  # that pass the right samplers, and that give the wrong ones away
PLAIN = SamplingRule()
NUCLEUS = SamplingRule(temperature=0.7, top_p=0.8)
GREEDY = SamplingRule(temperature=0.0)
N, ROWS, WINDOW = 14, 16, 3  # of the larger model; one shape, compiled once a scheme


def _enlarged(seed=0, **changes):
  """Matrices of std 0.15, modulation included, and embeddings of std 1: nothing is negligible."""
  model = AOGPT(ModelConfig(**(dict(
      vocab_size=3, context_length=4, num_layers=2, num_heads=1, embed_dim=16, condition_dim=16,
      init_std=0.15, gate_init=1.0, initializer='normal') | changes)), rngs=nnx.Rngs(seed))
  for name in ('token', 'position', 'none', 'target'):
    table = getattr(model, f'{name}_embedding').embedding
    table[...] = table[...] / 0.15
  return model


@functools.cache
def _small():
  return _enlarged(179)  # of 500: depends much on context and target, and its nucleus holds 8 texts


@functools.cache
def _large():
  return _enlarged(vocab_size=11, context_length=N, position_encoding='target_rotary')


@functools.cache
def _forward():
  return jax.jit(_small().__call__)


@functools.cache
def _exact_law(rule=PLAIN, group=1):
  """Probabilities of the 81 sequences by the training form, `group` tokens a step in ORDER.

  In a group that starts at m, the token at j is predicted with σ(m) and σ(j) swapped.
  """
  log_law = np.zeros(81)
  for j in range(4):
    m = j - j % group
    order = ORDER.copy()
    order[[m, j]] = order[[j, m]]
    logits = _forward()(SEQUENCES, np.tile(order, (81, 1)))[:, m]
    logits = np.asarray(transform(logits, rule), np.float64)
    log_law += scipy.special.log_softmax(logits, axis=-1)[np.arange(81), SEQUENCES[:, order[m]]]
  law = np.exp(log_law)
  np.testing.assert_allclose(law.sum(), 1, rtol=1e-5)
  return law / law.sum()


def _distance(counts, rule=PLAIN):
  """(chi-square p value, total variation) of counts (81,) from the exact law."""
  law = _exact_law(rule)
  expected = law * counts.sum()
  assert counts[law == 0].sum() == 0
  observed, wanted = counts[law > 0], expected[law > 0]
  rare = wanted < 5  # the chi-square law needs a few in every cell
  if rare.any():
    observed, wanted = (np.append(x[~rare], x[rare].sum()) for x in (observed, wanted))
  p_value = scipy.stats.chisquare(observed, wanted).pvalue
  distance = 0.5 * np.abs(counts / counts.sum() - law).sum()
  return p_value, distance


@pytest.fixture
def fast(monkeypatch):
  """Compiles with the optimisation that `conftest` takes out, and anew in every test."""
  run = module._speculate.__wrapped__
  monkeypatch.setattr(module, '_speculate', jax.jit(
      lambda *args, **options: run(*args, **options), static_argnums=0,
      static_argnames=('rule', 'window', 'scheme', 'prefill'),
      compiler_options={'xla_backend_optimization_level': 1}))


def _counts(run, batches):
  """How often each of the 81 sequences is drawn; run: (key, orders) -> tokens of 8192 rows."""
  orders = np.tile(ORDER, (BATCH, 1))
  def count(seed):
    tokens = np.asarray(run(jax.random.key(seed), orders))
    return np.bincount(tokens @ [27, 9, 3, 1], minlength=81)
  first = count(0)  # compiles
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    return first + sum(threads.map(count, range(1, batches)))


def _speculated(scheme, window, rule=PLAIN, batches=BATCHES):
  def run(key, orders):
    result = speculative(_small(), key, orders, scheme=scheme, window=window, rule=rule)
    calls = np.asarray(result.calls)
    assert calls.min() >= 1 and calls.max() <= 4
    assert (result.accepted <= result.drafted).all()
    return result.tokens
  return _counts(run, batches)


def test_the_model_tells_exact_from_parallel():
  """Without this the tests below would pass for any sampler."""
  law = _exact_law()
  assert law.min() * BATCHES * BATCH >= 5
  assert 8 <= (_exact_law(NUCLEUS) > 0).sum() < 81
  for group in (2, 4):
    assert 0.5 * np.abs(_exact_law(group=group) - law).sum() >= 0.2


@pytest.mark.parametrize(('scheme', 'window', 'rule'), [
    pytest.param('T', 1, PLAIN, marks=pytest.mark.slow), ('T', 2, PLAIN),
    pytest.param('T', 4, PLAIN, marks=pytest.mark.slow), ('FS', 1, PLAIN),
    ('FS', 2, PLAIN), pytest.param('FS', 3, PLAIN, marks=pytest.mark.slow),
    ('T', 2, NUCLEUS), pytest.param('FS', 1, NUCLEUS, marks=pytest.mark.slow)])
def test_the_law_is_that_of_one_token_a_step(fast, scheme, window, rule):
  """196,608 draws: the exact law has TV 0.007, and 0.013 once in a million times."""
  p_value, distance = _distance(_speculated(scheme, window, rule), rule)
  assert p_value > 1e-4
  assert distance < 0.013


def test_parallel_generation_has_another_law():
  counts = _counts(lambda key, orders: generate(_small(), key, orders, steps=2), FEW)
  assert _distance(counts)[0] < 1e-12


@pytest.mark.parametrize(('name', 'wrong', 'batches'), [
    ('_residual', lambda q, p: q, FEW),
    pytest.param('_kept', lambda new, chain: new[:, -chain:], BATCHES, marks=pytest.mark.slow)])
def test_a_wrong_sampler_is_noticed(fast, monkeypatch, name, wrong, batches):
  """A refused draft replaced from q; the keys and values of a copy cached."""
  monkeypatch.setattr(module, name, wrong)
  assert _distance(_speculated('T', 3, batches=batches))[0] < 1e-12


def _batch(seed=0):
  """Tokens, orders, prompt lengths (0, 5 and others) and ends that differ from row to row."""
  rng = np.random.default_rng(seed)
  orders = rng.permuted(np.tile(np.arange(N, dtype=np.int32), (ROWS, 1)), axis=1)
  start = rng.integers(0, 6, ROWS).astype(np.int32)
  start[[0, -1]] = 0, 5
  end = rng.integers(start, N + 1).astype(np.int32)
  end[[1, 2]] = N, start[2]
  return rng.integers(0, 11, (ROWS, N)).astype(np.int32), orders, start, end


def _run(batch, seed=5, model=None, **options):
  tokens, orders, start, end = batch
  return speculative(model or _large(), jax.random.key(seed), orders, tokens=tokens,
                     prompt_length=start, end=end, **dict(window=WINDOW) | options)


SCHEMES = pytest.mark.parametrize('scheme', ['T', 'FS'])


@SCHEMES
@pytest.mark.parametrize('window', [WINDOW, N])
def test_the_cache_is_that_of_a_full_forward(scheme, window):
  """Of every item below `end`, after any history of refused drafts; every row its own lengths."""
  tokens, orders, start, end = _batch()
  model = _large()
  graphdef, params = nnx.split(model)
  given = np.take_along_axis(tokens, orders, axis=1)
  state = module._speculate(graphdef, params, jax.random.key(0), np.arange(ROWS), given, orders,
                            start, end, rule=PLAIN, window=window, scheme=scheme,
                            prefill=8)
  np.testing.assert_array_equal(state.known, end)
  assert (state.accepted < state.drafted).any()
  _, want = model.extend(make_items(state.generated, orders), model.unstack(), [None, None])
  used = np.arange(N) < end[:, None]
  for layer_got, layer_want in zip(state.cache, want):
    for got, full in zip(layer_got, layer_want):
      np.testing.assert_allclose(np.moveaxis(got, -1, 1)[used], full[used], rtol=0, atol=1e-5)
      assert np.abs(full).mean() > 0.1


@SCHEMES
def test_each_row_by_itself(scheme):
  """Any orders, prompts and ends in one batch; a row is the same whatever stands next to it."""
  batch, other = _batch(), _batch(seed=1)
  whole = _run(batch, scheme=scheme)
  for b in range(ROWS):
    mixed = [array.copy() for array in other]
    for mine, theirs in zip(batch, mixed):
      theirs[b] = mine[b]
    for got, want in zip(_run(mixed, scheme=scheme), whole):
      np.testing.assert_array_equal(got[b], want[b])


@SCHEMES
def test_given_tokens_and_those_behind_the_end(scheme):
  """Both come back, the holes are not read, and no row takes more calls than tokens."""
  tokens, orders, start, end = _batch()
  result = _run((tokens, orders, start, end), scheme=scheme)
  index = np.arange(N)
  hole = (index >= start[:, None]) & (index < end[:, None])
  in_order = lambda x: np.take_along_axis(np.asarray(x), orders, axis=1)
  np.testing.assert_array_equal(in_order(result.tokens)[~hole], in_order(tokens)[~hole])
  assert (in_order(result.tokens) != in_order(tokens))[hole].mean() > 0.5
  assert (result.calls <= end - start).all()
  assert ((result.calls > 0) == (end > start)).all()

  hidden = tokens.copy()
  behind = index >= start[:, None]
  np.put_along_axis(hidden, orders, np.where(behind, -1000, in_order(tokens)), axis=1)
  again = _run((hidden, orders, start, end), scheme=scheme)
  np.testing.assert_array_equal(in_order(again.tokens)[hole], in_order(result.tokens)[hole])
  assert (in_order(again.tokens)[index >= end[:, None]] == -1000).all()


def test_rows_and_keys_draw_their_own_tokens():
  """Equal rows of two keys differ, and no key is used for two tokens of a row."""
  tokens, orders = np.zeros((ROWS, N), np.int32), np.tile(np.arange(N), (ROWS, 1))
  rows = np.concatenate([_run((tokens, orders, 5, N), seed=seed).tokens for seed in range(2)])
  assert len(np.unique(rows, axis=0)) == 2 * ROWS
  assert max((rows[:, i] == rows[:, j]).mean() for i, j in
             itertools.combinations(range(5, N), 2)) < 0.6


def test_greedy_is_greedy():
  """T = FS = one token a step, at temperature 0."""
  tokens, orders, *_ = _batch()
  want = generate(_large(), jax.random.key(0), orders, rule=GREEDY, tokens=tokens, prompt_length=5)
  for scheme in ('T', 'FS'):
    got = _run((tokens, orders, 5, N), scheme=scheme, rule=GREEDY)
    np.testing.assert_array_equal(got.tokens, want)
    assert (got.calls < N - 5).any()


@SCHEMES
def test_calls_if_every_draft_is_kept(scheme):
  """A model of targets alone, without context: drafts are exact, and 4 tokens a round final."""
  model = nnx.clone(_large())
  for name in ('token', 'position', 'none'):
    getattr(model, f'{name}_embedding').embedding[...] *= 0
  model.blocks.attention.out.kernel[...] *= 0
  tokens, orders, start, end = _batch()
  result = _run((tokens, orders, start, end), model=model, scheme=scheme)
  count = end - start
  if scheme == 'T':  # a round for one token that is left has one call
    want = 2 * -(-count // 4) - (count % 4 == 1)
  else:  # the first call has no drafts
    want = np.where(count > 0, 1 + -(-(count - 1) // 4), 0)
  np.testing.assert_array_equal(result.calls, want)
  np.testing.assert_array_equal(result.accepted, result.drafted)


def test_padding_ids_are_never_drawn():
  tokens, orders, *_ = _batch()
  rule = SamplingRule(num_ids=5)
  drawn = np.asarray(_run((tokens % 5, orders, 5, N), rule=rule).tokens)
  assert set(np.unique(drawn)) == set(range(5))


def test_nothing_to_generate():
  """Rows that are complete take no calls and come back."""
  tokens, orders, start, _ = _batch()
  result = _run((tokens, orders, start, start))
  np.testing.assert_array_equal(result.tokens, tokens)
  assert not result.calls.any() and not result.drafted.any()


@pytest.mark.parametrize(('changes', 'message'), [
    ({'orders': [[0, 1, 1]]}, r'every row must be a permutation of 0..2'),
    ({'orders': [list(range(15))]}, 'length 15: the context_length of this model is 14'),
    ({'window': 0}, 'window=0: must be at least 1'),
    ({'scheme': 'SF'}, 'did you mean "FS"'),
    ({'prompt_length': 1}, r'prompt_length=\[1\]: needs `tokens`'),
    ({'prompt_length': 4}, r'prompt_length=\[4\]: must be in 0..3'),
    ({'prompt_length': -1}, r'prompt_length=\[-1\]: must be in 0..3'),
    ({'prompt_length': [1, 2]}, 'one integer or one for each of the 1 rows'),
    ({'end': 1.5}, r'end=1.5: must be one integer'),
    ({'end': 4}, r'end=\[4\]: must be in 0..3'),
    ({'end': 1, 'prompt_length': 2}, r'end=\[1\]'),
    ({'tokens': np.zeros((1, 2), int)}, r'tokens=\(1, 2\): must have the shape \(1, 3\)'),
    ({'rule': SamplingRule(top_p=2.0)}, 'top_p=2.0')])
def test_errors(changes, message):
  arguments = {'orders': [[2, 0, 1]]} | changes
  with pytest.raises(UserError, match=message):
    speculative(_large(), jax.random.key(0), np.array(arguments.pop('orders')), **arguments)


def test_an_encoder_is_refused():
  model = MaskedEncoder(ModelConfig(
      architecture='encoder', target_injection='none', vocab_size=3, context_length=4,
      num_layers=1, num_heads=1, embed_dim=4), rngs=nnx.Rngs(0))
  with pytest.raises(UserError, match='needs a decoder'):
    speculative(model, jax.random.key(0), jnp.array([[0, 1]]))
