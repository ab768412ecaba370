"""The decoder: who sees what, shapes and initial values, precision, dropout, position encodings."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from aogpt_jax import interop
from aogpt_jax.config import INJECTIONS
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, Items, ModelConfig

ENCODINGS = ('learned', 'target_rotary')
N = 8


@functools.cache
def _model(**changes):
  return AOGPT(ModelConfig(**(dict(
      vocab_size=11, context_length=N, num_layers=2, num_heads=2, embed_dim=16, condition_dim=8,
      rotary_base=20.0, use_bias=True, init_std=0.4) | changes)), rngs=nnx.Rngs(1))


def _batch(rows, length=N, seed=0):
  """Distinct tokens (rows, length), and random orders."""
  rng = np.random.default_rng(seed)
  shuffled = lambda n: rng.permuted(np.tile(np.arange(n), (rows, 1)), axis=1).astype(np.int32)
  return shuffled(11)[:, :length], shuffled(length)


@functools.cache
def _logits(**changes):
  return jax.jit(_model(**changes).__call__)


def _tables(params, injection):
  """The tables that tokens, positions and targets come in by: name -> path in the parameters."""
  tables = {'token': ('token_embedding', 'embedding'),
            'position': ('position_embedding', 'embedding')}
  if injection == 'every_block_distinct':
    tables['target'] = ('blocks', 'target_embedding', 'embedding')
  elif injection != 'none':
    tables['target'] = ('target_embedding', 'embedding')
  return tables


@pytest.mark.parametrize(('encoding', 'injection'), [
    *itertools.product(ENCODINGS, ('adaln',)), *itertools.product(('learned',), INJECTIONS[1:])])
def test_logits_see_exactly_the_earlier_steps(encoding, injection):
  """d logits[t] / d (what step s brings in) is exactly 0 for s >= t, and not 0 for s < t.

  Every position has a token of its own, so the rows of the tables are the inputs of the steps. The
  target of a step may be seen from the step itself on: it says which token is wanted.
  """
  graphdef, params = nnx.split(_model(position_encoding=encoding, target_injection=injection))
  params = nnx.traversals.flatten_mapping(nnx.to_pure_dict(params))
  paths = _tables(params, injection)
  mix = jax.random.normal(jax.random.key(0), (11,))

  @jax.jit
  def influence(tokens, orders):
    """Norms (t, row of the table) of the gradients for each table."""
    def mixed(tables):
      state = params | {paths[name]: table for name, table in tables.items()}
      model = nnx.merge(graphdef, nnx.traversals.unflatten_mapping(state))
      return (model(tokens[None], orders[None])[0] * mix).sum(axis=-1)
    tables = {name: params[path] for name, path in paths.items()}
    gradients = jax.jacrev(mixed)(tables)
    if injection == 'every_block_distinct':  # (t, layer, row, width)
      gradients['target'] = jnp.moveaxis(gradients['target'], 1, -1)
    return jax.tree.map(lambda g: jnp.abs(g).reshape(*g.shape[:2], -1).max(axis=-1), gradients)

  earlier = np.tril(np.ones((N, N), bool), -1)  # step s < t, at [t, s]
  for tokens, orders in zip(*_batch(3)):
    seen = influence(tokens, orders)
    np.testing.assert_array_equal(seen['token'][:, tokens[orders]] != 0, earlier)
    np.testing.assert_array_equal(seen['position'][:, orders + 1] != 0, earlier)
    if injection != 'none':
      np.testing.assert_array_equal(seen['target'][:, orders] != 0,
                                    np.tril(np.ones((N, N), bool)))
    assert (seen['position'][:, 0] != 0).all()  # [NONE] is seen by all


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_logits_ignore_the_order_of_later_steps(encoding):
  """Another order behind step t leaves the logits up to t alone: rotation does not leak either."""
  tokens, orders = _batch(3)
  for t in (0, 3, 6):
    other = np.concatenate([orders[:, :t + 1], orders[:, :t:-1]], axis=1)
    a, b = (_logits(position_encoding=encoding)(tokens, o)[:, :t + 1] for o in (orders, other))
    chex.assert_trees_all_close(a, b, rtol=0, atol=1e-6)


def test_logits_are_in_generation_order():
  """Row t of the logits is for the target orders[:, t]: step 0 knows nothing but its target."""
  tokens, orders = _batch(4)
  first = np.asarray(_logits()(tokens, orders)[:, 0])
  for b, c in np.ndindex(4, 4):
    same = np.allclose(first[b], first[c], atol=1e-6)
    assert same == (orders[b, 0] == orders[c, 0])


@pytest.mark.parametrize(('variant', 'bias', 'layers', 'heads', 'width', 'total'), [
    ({}, True, 12, 12, 768, 170_605_952), ({}, False, 12, 12, 768, 170_523_008),
    ({}, True, 24, 16, 1024, 425_804_928), ({}, False, 24, 16, 1024, 425_583_744),
    (interop.SIGMA_GPT, True, 12, 12, 768, 125_263_872),
    (interop.SIGMA_GPT, False, 12, 12, 768, 125_161_728),
    (interop.SIGMA_GPT, True, 24, 16, 1024, 355_921_920),
    (interop.SIGMA_GPT, False, 24, 16, 1024, 355_650_560)])
def test_parameter_counts_of_the_paper(variant, bias, layers, heads, width, total):
  """AO-GPT and σ-GPT, small and medium, bias on and off, without allocating them."""
  config = ModelConfig(num_layers=layers, num_heads=heads, embed_dim=width, use_bias=bias,
                       **variant)
  shapes = nnx.state(nnx.eval_shape(lambda: AOGPT(config, rngs=nnx.Rngs(0))), nnx.Param)
  assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == total


def _flat(model):
  return {'/'.join(map(str, path)): np.asarray(leaf[...])
          for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize('use_bias', [False, True])
def test_parameter_shapes(use_bias):
  """Every parameter by name: axes of heads and modulation rows are axes; layers are stacked."""
  d, c, h, k, v, layers = 16, 8, 2, 8, 11, 2
  want = {
      'token_embedding/embedding': (v, d), 'position_embedding/embedding': (N + 1, d),
      'target_embedding/embedding': (N, c), 'none_embedding/embedding': (1, d),
      'blocks/norm1/scale': (layers, d), 'blocks/norm2/scale': (layers, d),
      'blocks/attention/qkv/kernel': (layers, d, 3, h, k),
      'blocks/attention/q_norm/scale': (layers, k), 'blocks/attention/k_norm/scale': (layers, k),
      'blocks/attention/out/kernel': (layers, h, k, d),
      'blocks/up/kernel': (layers, d, 4 * d), 'blocks/down/kernel': (layers, 4 * d, d),
      'blocks/modulation/kernel': (layers, c, 6, d), 'blocks/modulation/bias': (layers, 6, d),
      'final_norm/scale': (d,), 'final_modulation/kernel': (c, 2, d),
      'final_modulation/bias': (2, d), 'head/kernel': (d, v), 'head/bias': (v,)}
  if use_bias:
    want |= {'blocks/attention/qkv/bias': (layers, 3, h, k), 'blocks/attention/out/bias':
             (layers, d), 'blocks/up/bias': (layers, 4 * d), 'blocks/down/bias': (layers, d)}
  shapes = nnx.eval_shape(lambda: AOGPT(ModelConfig(
      vocab_size=v, context_length=N, num_layers=layers, num_heads=h, embed_dim=d,
      condition_dim=c, use_bias=use_bias), rngs=nnx.Rngs(0)))
  got = {'/'.join(map(str, path)): leaf.shape
         for path, leaf in nnx.to_flat_state(nnx.state(shapes, nnx.Param))}
  assert got == want


def test_initial_values():
  """Truncated normal, std 0.02, residual projections by sqrt(2L) less; cut at 3 std."""
  model = AOGPT(ModelConfig(vocab_size=300, context_length=64, num_layers=3, num_heads=2,
                            embed_dim=64, condition_dim=32, use_bias=True), rngs=nnx.Rngs(0))
  uncut = scipy.stats.truncnorm(-3, 3).std()  # 0.9866: the variance is not corrected for the cut
  for name, value in _flat(model).items():
    if name.endswith('scale'):
      np.testing.assert_array_equal(value, 1, err_msg=name)
    elif name.endswith('bias'):
      np.testing.assert_array_equal(value, 0, err_msg=name)
    else:
      residual = name in ('blocks/attention/out/kernel', 'blocks/down/kernel')
      std = 0.02 / math.sqrt(6) if residual else 0.02
      tolerance = 5 / math.sqrt(2 * value.size)
      np.testing.assert_allclose(value.std(), std * uncut, rtol=tolerance, err_msg=name)
      assert abs(value).max() <= 3 * std * (1 + 1e-5), name
      if value.size > 5000:
        assert abs(value).max() > 2.8 * std, name
  layers = _flat(model)['blocks/up/kernel']
  assert len({layer.tobytes() for layer in layers}) == 3  # not one draw repeated


def test_normal_initialiser_is_not_cut():
  """σ-GPT's: std 0.02 with tails beyond 3 std, residual projections divided all the same."""
  flat = _flat(AOGPT(ModelConfig(
      vocab_size=300, context_length=64, num_layers=3, num_heads=2, embed_dim=64,
      target_injection='input', initializer='normal'), rngs=nnx.Rngs(0)))
  for name, std in (('token_embedding/embedding', 0.02), ('target_embedding/embedding', 0.02),
                    ('blocks/down/kernel', 0.02 / math.sqrt(6))):
    value = flat[name]
    np.testing.assert_allclose(value.std(), std, rtol=5 / math.sqrt(2 * value.size))
    assert abs(value).max() > 3.1 * std


def test_gate_init_is_the_bias_of_the_gates_alone():
  """Rows 2 and 5 of (shift, scale, gate) x 2; the final modulation has no gate."""
  flat = _flat(_model(gate_init=0.75))
  bias = flat['blocks/modulation/bias']
  np.testing.assert_array_equal(bias[:, [2, 5]], 0.75)
  np.testing.assert_array_equal(bias[:, [0, 1, 3, 4]], 0)
  np.testing.assert_array_equal(flat['final_modulation/bias'], 0)


def test_unrolled_layers_equal_scanned_ones():
  """`scan_layers` changes neither the logits nor any gradient."""
  tokens, orders = _batch(2)
  weights = jax.random.normal(jax.random.key(0), (2, N, 11))
  results = []
  for scan_layers in (True, False):
    graphdef, params = nnx.split(_model(scan_layers=scan_layers))
    loss = lambda p, g=graphdef: (weights * nnx.merge(g, p)(tokens, orders)).sum()
    results.append(jax.jit(jax.value_and_grad(loss))(nnx.to_pure_dict(params)))
  chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-4)


def test_bfloat16_rounds_but_returns_float32():
  """bf16 matmul inputs: off by more than float32 rounding, by less than 0.1 of logits' spread."""
  tokens, orders = _batch(8)
  want, got = (_logits(dtype=dtype)(tokens, orders) for dtype in ('float32', 'bfloat16'))
  chex.assert_type(got, jnp.float32)
  error = jnp.sqrt(jnp.mean((got - want) ** 2)) / want.std()
  assert 1e-4 < error < 0.1
  assert all(value.dtype == np.float32 for value in _flat(_model(dtype='bfloat16')).values())


def test_dropout_key():
  """No key: deterministic, whatever the rate; keys differ; rate 0 ignores the key."""
  tokens, orders = _batch(2)
  run = lambda rate, *key: np.asarray(_logits(dropout_rate=rate)(tokens, orders, *key))
  keys = jax.random.split(jax.random.key(0))
  np.testing.assert_array_equal(run(0.5), run(0.0))
  np.testing.assert_array_equal(run(0.5, keys[0]), run(0.5, keys[0]))
  assert np.abs(run(0.5, keys[0]) - run(0.5, keys[1])).max() > 0.01
  np.testing.assert_array_equal(run(0.0, keys[0]), run(0.0))


def test_dropout_falls_on_embedding_attention_and_mlp_independently():
  """With every branch made the constant 1, the stream counts the survivors of 1 + 2L dropouts.

  The sum of five independent masks of rate 1/2 is binomial. One dropout too few or too many, or a
  key used twice (in two layers, or in attention and MLP), changes the law.
  """
  graphdef, params = nnx.split(_model(dropout_rate=0.5))
  params = jax.tree.map(jnp.zeros_like, nnx.to_pure_dict(params))
  one = lambda module, leaf: module.update({leaf: jnp.ones_like(module[leaf])})
  one(params['token_embedding'], 'embedding')
  one(params['none_embedding'], 'embedding')
  one(params['final_norm'], 'scale')
  for name in ('attention', 'down', 'modulation'):  # out = 1, down = 1, gates = 1
    branch = params['blocks'][name]
    one(branch['out'] if name == 'attention' else branch, 'bias')
  tokens, orders = _batch(64)
  model = nnx.merge(graphdef, params)
  hidden = np.asarray(jax.jit(model.hidden)(tokens, orders, jax.random.key(3)))
  hidden = hidden.reshape(-1, 16)
  has_one = [np.sort(np.unique(np.round(row[row > 1e-6], 5))) for row in hidden]
  # The norm divides each item by its own length: recover the unit from the gap of two levels.
  counts = []
  for row, levels in zip(hidden, has_one):
    gaps = np.diff(levels)
    unit = min(gaps.min(), levels[0]) if len(gaps) else levels[0]
    counts.append(np.round(row / unit))
  observed = np.bincount(np.concatenate(counts).astype(int), minlength=6)
  assert len(observed) == 6
  expected = scipy.stats.binom(5, 0.5).pmf(np.arange(6)) * observed.sum()
  assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def _run_items(model, token, position, target):
  """Hidden states of given items, causal among themselves."""
  items = Items(*(jnp.asarray(x, jnp.int32)[None] for x in (token, position, target)))
  return np.asarray(model.extend(items, model.unstack(), [None] * model.config.num_layers)[0][0])


def _without_tables(**changes):
  """A target_rotary model that knows positions from the rotation alone."""
  model = nnx.clone(_model(position_encoding='target_rotary', gate_init=1.0, **changes))
  for table in (model.position_embedding, model.target_embedding):
    table.embedding[...] = jnp.zeros_like(table.embedding[...])
  return model


def test_rotary_sees_relative_positions_only():
  """Without tables, items shifted in position and target alike give the same; else not."""
  model = _without_tables()
  token, position, target = np.array([3, 9, 1, 4]), np.array([2, 4, 0, 1]), np.array([4, 0, 1, 3])
  here = _run_items(model, token, position, target)
  np.testing.assert_allclose(_run_items(model, token, position + 3, target + 3), here, rtol=0,
                             atol=1e-5)
  assert np.abs(_run_items(model, token, position, target + 3) - here)[1:].max() > 1e-2
  assert np.abs(_run_items(model, token, position + 3, target) - here)[1:].max() > 1e-2


def test_rotary_turns_queries_by_target_and_keys_by_position():
  """One layer without tables: a target is felt by its own item alone, a position from it on."""
  model = _without_tables(num_layers=1)
  token, position, target = np.array([3, 9, 1, 4]), np.array([2, 4, 0, 1]), np.array([4, 0, 1, 3])
  here = _run_items(model, token, position, target)
  moved = np.array([0, 3, 0, 0])  # item 1
  felt = lambda other: np.abs(other - here).max(axis=-1) > 1e-4
  np.testing.assert_array_equal(felt(_run_items(model, token, position, target + moved)),
                                [False, True, False, False])
  np.testing.assert_array_equal(felt(_run_items(model, token, position + moved, target)),
                                [False, True, True, True])


def test_target_rotary_adds_no_parameters_and_changes_the_logits():
  learned, rotary = (_model(position_encoding=encoding) for encoding in ENCODINGS)
  chex.assert_trees_all_equal(_flat(learned), _flat(rotary))
  tokens, orders = _batch(2)
  a, b = (_logits(position_encoding=encoding)(tokens, orders) for encoding in ENCODINGS)
  assert np.abs(a - b).max() > 0.01


def test_shapes_that_do_not_fit():
  """Too long a context, and tokens and orders of two shapes."""
  model = _model()
  long = jnp.zeros((1, N + 1), jnp.int32)
  with pytest.raises(UserError, match='length 9: the context_length of this model is 8'):
    model(long, long)
  with pytest.raises(UserError, match=r'tokens \(1, 8\) and orders \(2, 8\) must have one shape'):
    model(jnp.zeros((1, N), jnp.int32), jnp.zeros((2, N), jnp.int32))
