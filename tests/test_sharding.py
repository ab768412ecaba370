"""Meshes of eight virtual devices: rules for every parameter, equal numbers, less memory each."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import config as config_lib, sharding
from aogpt_jax.config import MeshConfig
from aogpt_jax.errors import UserError
from aogpt_jax.training import plan, step as step_lib

CONFIG = config_lib.Config(
    model=config_lib.ModelConfig(
        vocab_size=32, context_length=8, num_layers=2, num_heads=4, embed_dim=32, condition_dim=8,
        use_bias=True, dropout_rate=0.1, init_std=0.1, loss_chunk=3,
        position_encoding='target_rotary'),
    data=config_lib.DataConfig(vocab_size=32),
    order=config_lib.OrderConfig(name='uniform'),
    optimizer=config_lib.OptimizerConfig(warmup_steps=0, learning_rate=1e-2),
    train=config_lib.TrainConfig(num_steps=10, batch_size=16, accumulation=2))


@functools.cache
def _recipe():
  return step_lib.make_recipe(CONFIG)


def _shardings(*sizes):
  mesh = sharding.make_mesh(MeshConfig(*sizes), jax.devices()[:int(np.prod(sizes))])
  abstract = jax.eval_shape(lambda: step_lib.init_state(_recipe()))
  return mesh, sharding.state_shardings(mesh, abstract), abstract


@functools.cache
def _compiled(*sizes):
  """The step of a mesh."""
  mesh, shardings, abstract = _shardings(*sizes)
  step = step_lib.jit_step(_recipe(), shardings, sharding.batch_sharding(mesh))
  return step.lower(abstract, jax.ShapeDtypeStruct((16, 8), 'int32')).compile()


@functools.cache
def _train(*sizes):
  """Losses of 5 updates, the most bytes of the state that one device holds, and the weights."""
  mesh, shardings, _ = _shardings(*sizes)
  state = jax.jit(lambda: step_lib.init_state(_recipe()), out_shardings=shardings)()
  rows = sharding.batch_sharding(mesh)
  step = _compiled(*sizes)
  losses = []
  for seed in range(5):
    tokens = np.random.default_rng(seed).integers(0, 32, (16, 8)).astype(np.int32)
    state, metrics = step(state, sharding.global_array_from_all_rows(tokens, rows))
    losses.append(float(metrics['nats_per_token']))
  of_device = lambda d: sum(shard.data.nbytes for leaf in jax.tree.leaves(state)
                            for shard in leaf.addressable_shards if shard.device == d)
  weights = jax.tree.map(np.asarray, state.params)
  return np.array(losses), max(map(of_device, mesh.devices.flat)), weights


@pytest.mark.parametrize('sizes', [
    (1, 8, 1), (2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.slow),
    pytest.param((1, 1, 8), marks=pytest.mark.slow)])
def test_five_updates_are_those_of_one_device(sizes):
  """With dropout, micro-batches and a chunked loss; the losses move, and the weights agree."""
  losses, _, weights = _train(*sizes)
  want, _, want_weights = _train(1, 1, 1)
  np.testing.assert_allclose(losses, want, rtol=0, atol=1e-5)
  assert len(set(losses.round(3))) == 5
  for path, array in jax.tree.leaves_with_path(weights):
    np.testing.assert_allclose(array, functools.reduce(lambda t, k: t[k.key], path, want_weights),
                               rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(('sizes', 'rows'), [((8, 1, 1), 1), ((1, 8, 1), 1), ((2, 2, 2), 2)])
def test_a_device_computes_its_own_rows_of_every_micro_batch(sizes, rows):
  """8 rows a micro-batch: the residual stream of a device has 8 / (data x fsdp) of them."""
  shapes = set(re.findall(r'f32\[(\d+),8,32\]', _compiled(*sizes).as_text()))  # rows, n, d
  assert str(rows) in shapes and not shapes & {'8', '16'}
  assert 'f32[8,8,32]' in _compiled(1, 1, 8).as_text()


def test_heads_and_vocabulary_are_divided_over_tensor():
  """2 rows a device: half of 4 heads of width 8, half of 32 ids in a chunk of 3 steps."""
  program = _compiled(2, 2, 2).as_text()
  assert 'f32[2,8,3,2,8]' in program and 'f32[2,8,3,4,8]' not in program
  assert 'f32[2,3,16]' in program


def test_the_state_of_medium_is_an_eighth_a_device_under_fsdp():
  """Weights, average and moments, from the shapes of the shards; norms and biases are whole."""
  config = dataclasses.replace(CONFIG, model=config_lib.ModelConfig(
      num_layers=24, num_heads=16, embed_dim=1024))
  state = plan.abstract_state(config)
  for sizes in ((1, 8, 1), (8, 1, 1)):
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    for name, (whole, part) in plan.state_bytes(mesh, state).items():
      assert whole == 4 * 425_583_744 * (2 if name == 'optimizer' else 1) + (
          8 if name == 'optimizer' else 0)  # two counters
      assert 7.95 < whole / part <= 8 if sizes[1] == 8 else whole == part, name


@pytest.mark.slow
def test_an_encoder_s_updates_are_those_of_one_device():
  """Masks are drawn by the row's number in the global batch, so a mesh does not change them."""
  config = dataclasses.replace(CONFIG, model=dataclasses.replace(
      CONFIG.model, architecture='encoder', target_injection='none', position_encoding='rotary'))
  recipe = step_lib.make_recipe(config)
  results = []
  for sizes in ((1, 1, 1), (2, 2, 2)):
    mesh = sharding.make_mesh(MeshConfig(*sizes), jax.devices()[:int(np.prod(sizes))])
    shardings = sharding.state_shardings(mesh, jax.eval_shape(lambda: step_lib.init_state(recipe)))
    state = jax.jit(lambda: step_lib.init_state(recipe), out_shardings=shardings)()
    rows = sharding.batch_sharding(mesh)
    step, losses = step_lib.jit_step(recipe, shardings, rows), []
    for seed in range(3):
      tokens = np.random.default_rng(seed).integers(0, 32, (16, 8)).astype(np.int32)
      state, metrics = step(state, sharding.global_array_from_all_rows(tokens, rows))
      losses.append(float(metrics['nats_per_token']))
    results.append(losses)
  np.testing.assert_allclose(*results, rtol=0, atol=1e-5)
  assert len(set(np.round(losses, 3))) == 3


@pytest.mark.parametrize('changes', [
    dict(architecture='encoder', target_injection='none', position_encoding='learned'),
    dict(target_injection='every_block'), dict(target_injection='every_block_distinct'),
    dict(target_injection='input', norm='layernorm', qk_norm=False, tie_embeddings=True,
         head_bias=False)], ids=lambda c: c['target_injection'])
def test_every_model_has_rules_for_its_parameters(changes):
  """None without a rule, and every table of targets divided."""
  model = config_lib.ModelConfig(**(dict(vocab_size=32, context_length=8, num_layers=2, num_heads=4,
                                         embed_dim=32, use_bias=True) | changes))
  config = dataclasses.replace(CONFIG, model=model)
  abstract = jax.eval_shape(lambda: step_lib.init_state(step_lib.make_recipe(config)))
  mesh = sharding.make_mesh(MeshConfig(1, 8, 1))
  specs = sharding.state_shardings(mesh, abstract).params
  for path, placed in nnx.traversals.flatten_mapping(specs).items():
    if path[-1] in ('kernel', 'embedding'):
      assert 'fsdp' in placed.spec, path


def test_fsdp_divides_the_state():
  """8 ways: a quarter of the bytes at most (the small replicated tables are the rest)."""
  whole = _train(1, 1, 1)[1]
  assert _train(8, 1, 1)[1] == whole
  assert _train(1, 8, 1)[1] < whole / 4
  assert _train(2, 2, 2)[1] < whole / 2.5


def test_every_parameter_has_a_rule_that_fits_its_axes():
  """No path without a rule, no spec longer than its array; matrices are really divided."""
  _, shardings, abstract = _shardings(2, 2, 2)
  specs = nnx.traversals.flatten_mapping(jax.tree.map(lambda s: s.spec, shardings.params))
  shapes = nnx.traversals.flatten_mapping(abstract.params)
  assert specs.keys() == shapes.keys() and len(shapes) == 23
  for path, shape in shapes.items():
    rule = sharding.param_spec('/'.join(path))
    assert len(rule) <= len(shape.shape), path
    if path[-1] == 'kernel' or path[0] in ('token_embedding', 'position_embedding'):
      assert 'fsdp' in rule, path
      assert [a for a in specs[path] if a] == [
          a for i, a in enumerate(rule) if a and shape.shape[i] % 2 == 0], path
  split = {('blocks', 'attention', 'qkv', 'kernel'): 3, ('blocks', 'attention', 'out', 'kernel'): 1,
           ('blocks', 'up', 'kernel'): 2, ('blocks', 'down', 'kernel'): 1, ('head', 'kernel'): 1,
           ('token_embedding', 'embedding'): 0, ('head', 'bias'): 0, ('blocks', 'up', 'bias'): 1,
           ('blocks', 'attention', 'qkv', 'bias'): 2}
  for path, axis in split.items():
    assert specs[path][axis] == 'tensor', path
  with pytest.raises(KeyError, match='no partition rule for parameter blocks/new/weights'):
    sharding.param_spec('blocks/new/weights')


def test_moments_and_average_lie_where_the_parameters_do():
  """Every copy of the parameter tree in the state has its shardings."""
  _, shardings, _ = _shardings(2, 2, 2)
  want = jax.tree.map(lambda s: s.spec, shardings.params)
  specs = jax.tree.map(lambda s: s.spec, shardings)
  assert specs.ema == want
  flat = {jax.tree_util.keystr(path): spec
          for path, spec in jax.tree_util.tree_leaves_with_path(specs.opt_state)}
  for path, spec in jax.tree_util.tree_leaves_with_path(want):
    copies = [s for name, s in flat.items() if name.endswith(jax.tree_util.keystr(path))]
    assert copies == [spec, spec], path


def test_an_axis_that_does_not_divide_is_replicated():
  """4 heads over tensor = 8: whole on each device, not an error."""
  _, shardings, _ = _shardings(1, 1, 8)
  blocks = shardings.params['blocks']
  assert 'tensor' not in blocks['attention']['qkv']['kernel'].spec
  assert 'tensor' in blocks['up']['kernel'].spec


def test_mesh_takes_all_devices():
  """-1 takes what is left; else the product must be the number of devices."""
  shape = lambda **sizes: tuple(sharding.make_mesh(MeshConfig(**sizes)).shape.values())
  assert shape() == (8, 1, 1)
  assert shape(fsdp=2, tensor=2) == (2, 2, 2)
  assert shape(data=2, fsdp=-1) == (2, 4, 1)
  for sizes, text in ((dict(data=3), '[3, 1, 1]: the product is 3'),
                      (dict(fsdp=3), '[2, 3, 1]: the product is 6'),
                      (dict(fsdp=16), '[1, 16, 1]: the product is 16')):
    with pytest.raises(UserError, match=re.escape(f'data×fsdp×tensor={text}, but there are 8')):
      shape(**sizes)


def test_batches_must_divide():
  """Rows go over data x fsdp; the nearest valid sizes are named."""
  mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
  sharding.check_batch(mesh, 'train.batch_size', 12)
  with pytest.raises(UserError, match='train.batch_size=10: .*multiple of 4; .*: 8 and 12$'):
    sharding.check_batch(mesh, 'train.batch_size', 10)
  with pytest.raises(UserError, match='eval.batch_size=3: .*the nearest: 4$'):
    sharding.check_batch(mesh, 'eval.batch_size', 3)
