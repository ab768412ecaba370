"""The update: the reference's trace, accumulation, decay mask, schedule, average."""

import dataclasses
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import interop
from aogpt_jax.config import Config, ModelConfig, OptimizerConfig, OrderConfig, TrainConfig
from aogpt_jax.training import optimizer as optimizer_lib, step as step_lib

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


def _trace_config(trace) -> Config:
  h = json.loads(str(trace['hyperparameters']))
  return Config(
      model=interop.model_config(json.loads(str(trace['config']))),
      optimizer=OptimizerConfig(
          learning_rate=h['learning_rate'], min_learning_rate=h['min_lr'],
          warmup_steps=h['warmup_iters'], decay_steps=h['lr_decay_iters'],
          weight_decay=h['weight_decay'], b1=h['beta1'], b2=h['beta2'], clip_norm=h['grad_clip'],
          ema_decay=h['ema_rate']),
      train=TrainConfig(num_steps=h['steps'], batch_size=8, accumulation=h['grad_accumulation']))


def _arrays(trace, part):
  return {k.removeprefix(part): trace[k] for k in trace.files if k.startswith(part)}


def test_twelve_steps_of_the_reference():
  """Losses, norms, rates, final and averaged weights of the reference implementation."""
  trace = np.load(GOLDEN / 'train_trace.npz')
  config = _trace_config(trace)
  recipe = step_lib.make_recipe(config)
  params = interop.params_from_reference(config.model, _arrays(trace, 'init/'))
  state = step_lib.TrainState(jnp.int32(0), params, params, recipe.optimizer.init(params))
  update = jax.jit(lambda *args: step_lib.update(recipe, *args))
  seen = []
  for tokens, orders in zip(trace['tokens'], trace['orders']):
    state, metrics = update(state, jnp.asarray(tokens, jnp.int32), jnp.asarray(orders, jnp.int32))
    seen.append(metrics)
  losses, norms, rates = (np.array([float(m[name]) for m in seen])
                          for name in ('nats_per_token', 'grad_norm', 'learning_rate'))
  np.testing.assert_allclose(losses, trace['losses'], rtol=0, atol=1e-5)
  np.testing.assert_allclose(norms, trace['grad_norms'], rtol=1e-4)
  np.testing.assert_allclose(rates, trace['learning_rates'], rtol=1e-6, atol=1e-12)
  for part, got in (('final/', state.params), ('ema/', state.ema)):
    want = interop.params_from_reference(config.model, _arrays(trace, part))
    chex.assert_trees_all_close(got, want, rtol=0, atol=1e-4)


def _tiny(**train) -> Config:
  return Config(
      model=ModelConfig(vocab_size=17, context_length=8, num_layers=2, num_heads=2, embed_dim=16,
                        condition_dim=8, use_bias=True),
      order=OrderConfig(name='uniform'),
      optimizer=OptimizerConfig(warmup_steps=0, learning_rate=1e-2, weight_decay=0.5),
      train=TrainConfig(num_steps=10, batch_size=8, **train))


def test_accumulation_changes_nothing():
  """One micro-batch of 8 rows against 4 of 2: same orders, same weights after 3 steps."""
  tokens = np.random.default_rng(0).integers(0, 17, (3, 8, 8)).astype(np.int32)
  results = []
  for accumulation in (1, 4):
    recipe = step_lib.make_recipe(_tiny(accumulation=accumulation))
    state = step_lib.init_state(recipe)
    step = jax.jit(lambda s, t, r=recipe: step_lib.train_step(r, s, t))
    for batch in tokens:
      state, _ = step(state, batch)
    results.append(state)
  chex.assert_trees_all_close(results[0].params, results[1].params, rtol=0, atol=1e-6)
  moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), results[0].params,
                       step_lib.init_state(recipe).params)
  assert min(jax.tree.leaves(moved)) > 1e-3  # the comparison is not between untouched weights


@pytest.mark.slow
def test_each_micro_batch_has_its_own_dropout():
  """Equal rows in both micro-batches: with one key for both, the halves' losses would be equal."""
  config = _tiny(accumulation=2)
  config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout_rate=0.5))
  recipe = step_lib.make_recipe(config)
  params = step_lib.init_state(recipe).params
  tokens = jnp.tile(jnp.arange(8, dtype=jnp.int32), (2, 4, 1))
  orders = jnp.tile(jnp.arange(8, dtype=jnp.int32), (2, 4, 1))
  key = jax.random.key(0)
  both, _ = step_lib.accumulate(recipe, params, tokens, orders, key)
  first, _ = step_lib.accumulate(recipe, params, tokens[:1], orders[:1], key)
  assert float(both) != pytest.approx(float(first), abs=1e-7)


def test_orders_depend_on_step_and_seed():
  """Two steps, and two seeds, see different orders of the same tokens."""
  tokens = np.random.default_rng(0).integers(0, 17, (8, 8)).astype(np.int32)
  losses = []
  for seed, step in ((0, 0), (0, 1), (1, 0)):
    recipe = step_lib.make_recipe(dataclasses.replace(_tiny(), seed=seed))
    state = step_lib.init_state(step_lib.make_recipe(_tiny()))._replace(step=jnp.int32(step))
    losses.append(float(step_lib.train_step(recipe, state, tokens)[1]['nats_per_token']))
  assert len(set(losses)) == 3


def test_decay_reaches_kernels_and_embeddings_only():
  """At zero gradient, AdamW shrinks exactly the tensors that have two axes in the reference."""
  config = _tiny()
  recipe = step_lib.make_recipe(config)
  params = step_lib.init_state(recipe).params
  params = jax.tree.map(lambda p: p + 1, params)
  zero = jax.tree.map(jnp.zeros_like, params)
  changes, _ = recipe.optimizer.update(zero, recipe.optimizer.init(params), params)
  for path, change in jax.tree_util.tree_leaves_with_path(changes):
    decays = path[-1].key in ('kernel', 'embedding')
    assert bool((change != 0).all()) == decays, path
    assert bool((change == 0).all()) != decays, path


def test_clip_has_the_epsilon_of_the_reference():
  clip = optimizer_lib.clip_by_global_norm(1.0)
  large, small = {'a': jnp.array([3.0, 4.0])}, {'a': jnp.array([0.3, 0.4])}
  clipped, _ = clip.update(large, clip.init(large))
  np.testing.assert_allclose(clipped['a'], np.array([3.0, 4.0]) / (5 + 1e-6), rtol=1e-7)
  kept, _ = clip.update(small, clip.init(small))
  np.testing.assert_array_equal(kept['a'], small['a'])


@pytest.mark.parametrize('warmup', [0, 3])
def test_schedule(warmup):
  """From 0 at step 0 over the warm-up to the peak, halfway at the middle, then the minimum."""
  config = Config(optimizer=OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2,
                                            warmup_steps=warmup, decay_steps=warmup + 10),
                  train=TrainConfig(num_steps=100))
  rate = optimizer_lib.learning_rate(config)
  np.testing.assert_allclose([rate(s) for s in range(warmup)], np.arange(warmup) / max(warmup, 1),
                             rtol=1e-6)
  np.testing.assert_allclose(
      [rate(warmup), rate(warmup + 5), rate(warmup + 10), rate(99)], [1.0, 0.6, 0.2, 0.2],
      rtol=1e-6)


def test_schedule_of_a_run_that_ends_within_its_warmup():
  config = Config(optimizer=OptimizerConfig(learning_rate=1.0, min_learning_rate=0.2,
                                            warmup_steps=10), train=TrainConfig(num_steps=4))
  rate = optimizer_lib.learning_rate(config)
  np.testing.assert_allclose([rate(s) for s in (0, 3, 10)], [0.0, 0.3, 0.2], rtol=1e-6)


def test_ema_ramp():
  """After three updates from 0 towards 1: 1 - (1 - 2/11)… in the reference's ramp; then capped."""
  ema = {'a': jnp.zeros(())}
  for k in (1, 2, 3):
    ema = optimizer_lib.update_ema(ema, {'a': jnp.ones(())}, jnp.int32(k), 0.9999)
  np.testing.assert_allclose(ema['a'], 1 - (2 / 11) * (3 / 12) * (4 / 13), rtol=1e-6)
  capped = optimizer_lib.update_ema({'a': jnp.zeros(())}, {'a': jnp.ones(())}, jnp.int32(10**6),
                                    0.75)
  np.testing.assert_allclose(capped['a'], 0.25, rtol=1e-6)
  none = optimizer_lib.update_ema({'a': jnp.zeros(())}, {'a': jnp.ones(())}, jnp.int32(5), 0.0)
  assert none['a'] == 1
