"""The configuration: round trips, types, and which fields forbid continuing a run."""

import dataclasses
import pathlib
import runpy

import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.config import Config
from aogpt_jax.errors import UserError

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / 'configs').rglob('*.py'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_are_valid_and_round_trip(path):
  config = config_lib.from_dict(runpy.run_path(str(path))['get_config']())
  assert config != Config()
  assert config_lib.from_json(config_lib.to_json(config)) == config


@pytest.mark.parametrize(('values', 'message'), [
    ({'modle': {}}, 'modle: no such config field; did you mean "model"?'),
    ({'model': {'num_layer': 1}}, 'model.num_layer: no such config field; did you mean'),
    ({'model': {'num_layers': 2.5}}, 'model.num_layers=2.5: must be of type int'),
    ({'model': {'scan_layers': 1}}, 'model.scan_layers=1: must be of type bool'),
    ({'order': {'permutation': (0, 'a')}}, 'must hold values of type int'),
    ({'train': {'batch_size': 10, 'accumulation': 4}}, 'must divide train.batch_size=10'),
    ({'order': {'name': 'blockwise', 'block_size': 7}}, 'must divide model.context_length=1024'),
    ({'order': {'name': 'fixed', 'permutation': (0, 0)}}, 'must hold each of 0..1023 once'),
    ({'seed': -1}, 'seed=-1: must be an integer in [0, 2**32)'),
    ({'order': {'seed': 2**64}}, 'order.seed=18446744073709551616: must be'),
    ({'sample': {'temperature': float('inf')}}, 'sample.temperature=inf: must be finite'),
    ({'sample': {'steps': 1025}}, 'sample.steps=1025: must be at most model.context_length=1024'),
    ({'mesh': {'data': -1, 'fsdp': -1}}, 'at most one axis may be -1'),
    ({'optimizer': {'ema_decay': 1.0}}, 'optimizer.ema_decay=1.0: must be in [0, 1)'),
    ({'model': {'position_encoding': 'target_rotary', 'embed_dim': 6, 'num_heads': 2}},
     'needs an even head width'),
    ({'model': {'embed_dim': 10**15, 'num_heads': 9}}, 'the nearest that does is 8'),
    ({'model': {'embed_dim': 100, 'num_heads': 12}}, 'the nearest that does is 10'),
    ({'model': {'gate_init': float('nan')}}, 'model.gate_init=nan: must be finite'),
    ({'optimizer': {'eps': float('inf')}}, 'optimizer.eps=inf: must be finite'),
    ({'model': {'target_injection': 'adaLN'}}, 'did you mean "adaln"?'),
    ({'model': {'norm': 'layer_norm'}}, 'did you mean "layernorm"?'),
    ({'model': {'initializer': 'trunc_normal'}}, 'did you mean "truncated_normal"?'),
    ({'model': {'architecture': 'encoder'}}, "model.target_injection='adaln': must be 'none' with"),
    ({'model': {'architecture': 'encoder', 'position_encoding': 'target_rotary'}},
     "did you mean \"rotary\"?"),
    ({'model': {'position_encoding': 'rotary'}}, 'those of architecture=\'decoder\'; did you mean'),
    ({'model': {'tie_embeddings': True}}, 'model.head_bias=True: must be False with'),
    ({'model': {'architecture': 'encoder', 'target_injection': 'none'}},
     "order.name='mixture': must be 'uniform' with model.architecture='encoder'"),
    ({'model': {'target_injection': 'none'}}, "order.name='mixture': varies from row to row"),
    ({'model': {'target_injection': 'none'}, 'order': {'name': 'blockwise', 'inner': 'random'}},
     "order.name='blockwise': with order.inner=random varies from row to row"),
    ({'diffusion': {'masking': 'lineal'}}, 'diffusion.masking=\'lineal\': not one of'),
])
def test_errors_name_field_value_and_rule(values, message):
  with pytest.raises(UserError) as error:
    config_lib.from_dict(values)
  assert message in str(error.value)


@pytest.mark.parametrize('model', [
    {'target_injection': 'none', 'position_encoding': 'target_rotary'},
    {'target_injection': 'input'}])
def test_orders_may_vary_where_the_target_is_told(model):
  """By a rotation of the queries, or by an embedding."""
  assert config_lib.from_dict({'model': model}).model.knows_target


def test_an_int_is_taken_for_a_float_field():
  config = config_lib.from_dict({'optimizer': {'learning_rate': 1}})
  assert type(config.optimizer.learning_rate) is float


def _change(value):
  if isinstance(value, bool):
    return not value
  if isinstance(value, tuple):
    return (*value, 1)
  return value + 1 if isinstance(value, int | float) else value + 'x'


def test_every_field_is_either_free_or_forbids_continuing():
  """A field that changes the weights must be compared; one left out would corrupt a resumed run."""
  base = Config()
  free = set()
  for section in dataclasses.fields(base):
    old = getattr(base, section.name)
    if not dataclasses.is_dataclass(old):
      changed = dataclasses.replace(base, **{section.name: _change(old)})
      assert config_lib.differing_fields(base, changed) == [f'{section.name}: {old} -> {old + 1}']
      continue
    for field in dataclasses.fields(old):
      new = object.__new__(type(old))  # past the validation: any other value will do
      new.__dict__.update(vars(old) | {field.name: _change(getattr(old, field.name))})
      changed = object.__new__(Config)
      changed.__dict__.update(vars(base) | {section.name: new})
      if not config_lib.differing_fields(base, changed):
        free.add(f'{section.name}.{field.name}')
  assert free == {
      'train.log_every', 'train.eval_every', 'train.checkpoint_every', 'train.keep_checkpoints',
      'train.wandb_project', 'mesh.data', 'mesh.fsdp', 'mesh.tensor',
      'data.directory', 'data.workers', 'data.validation',
      'model.scan_layers', 'model.loss_chunk', 'model.attention', 'model.remat',
      'train.compilation_cache',
      *(f'eval.{f.name}' for f in dataclasses.fields(config_lib.EvalConfig)),
      *(f'sample.{f.name}' for f in dataclasses.fields(config_lib.SampleConfig))}


def test_a_longer_run_of_the_same_schedule_may_continue():
  """num_steps is free where decay_steps is stated; where it is not, the cosine would move."""
  make = lambda steps, decay: config_lib.from_dict(
      {'train': {'num_steps': steps}, 'optimizer': {'decay_steps': decay}})
  assert config_lib.differing_fields(make(3000, 2500), make(4000, 2500)) == []
  (message,) = config_lib.differing_fields(make(3000, 0), make(4000, 0))
  assert message.startswith('train.num_steps: 3000 -> 4000') and 'decay_steps=3000' in message
  assert config_lib.differing_fields(make(3000, 0), make(4000, 3000)) == []  # as it advises
