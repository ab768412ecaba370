"""Every file of configs/, every variant: it says what it runs, and what it says runs."""

import dataclasses
import functools
import math
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import jax
import ml_collections
import numpy as np
import pytest
from absl import flags
from flax import nnx
from ml_collections import config_flags

from aogpt_jax import config as config_lib, model as model_lib, orders
from aogpt_jax.config import Config, ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.training import step as step_lib

ROOT = pathlib.Path(__file__).parents[1]
FILES = {str(p.relative_to(ROOT)): runpy.run_path(str(p)) for p in (ROOT / 'configs').rglob('*.py')}
RUNS = [(path, variant) for path, module in sorted(FILES.items())
        for variant in module.get('VARIANTS', ('',))]

# Of the reference implementation: without and with biases.
PARAMETERS = {
    'configs/small.py': (170_523_008, 170_605_952),
    'configs/medium.py': (425_583_744, 425_804_928),
    'configs/small_sigma.py': (125_161_728, 125_263_872),
    'configs/medium_sigma.py': (355_650_560, 355_921_920),
}


def get_config(path: str, variant: str) -> ml_collections.ConfigDict:
  return FILES[path]['get_config'](*[variant] * bool(variant))


def load(path: str, variant: str) -> Config:
  return config_lib.from_dict(get_config(path, variant))


@functools.cache
def num_parameters(config: ModelConfig) -> int:
  model = nnx.eval_shape(lambda: model_lib.make(config, rngs=nnx.Rngs(0)))
  return sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(('path', 'variant'), RUNS)
def test_it_validates_and_builds_with_the_papers_number_of_parameters(path, variant):
  model = load(path, variant).model
  count = num_parameters(model)
  if path in PARAMETERS:
    assert not model.use_bias
    biased = num_parameters(dataclasses.replace(model, use_bias=True))
    assert (count, biased) == PARAMETERS[path]


def test_the_baselines_differ_from_the_papers_models_in_what_they_leave_out():
  gpt, encoder = (num_parameters(load(f'configs/small_{name}.py', '').model)
                  for name in ('gpt', 'encoder'))
  no_bias, bias = PARAMETERS['configs/small_sigma.py']
  assert gpt == bias - 1024 * 768  # the table of targets
  modulation = 1024 * 128 + 12 * (128 + 1) * 6 * 768 + (128 + 1) * 2 * 768
  positions, mask = (1025 + 1) * 768, 768  # rotary; [NONE] is a [MASK]
  assert encoder == PARAMETERS['configs/small.py'][0] - modulation - positions + mask


def shrink(config: Config) -> Config:
  """A small copy, without what changes no number (loss chunks, micro-batches): the test's time is
  all compilation."""
  model = dataclasses.replace(
      config.model, vocab_size=64, context_length=16, num_layers=2, num_heads=2, embed_dim=32,
      condition_dim=8, loss_chunk=0)
  # Without warm-up: the first step of one has learning rate 0.
  return Config(model=model, order=config.order, diffusion=config.diffusion,
                optimizer=config_lib.OptimizerConfig(warmup_steps=0),
                train=config_lib.TrainConfig(batch_size=4))


# Each net with the first order that is found for it; the other orders are drawn below.
NETS = {shrink(load(*run)).model: run for run in reversed(RUNS)}


@pytest.mark.parametrize(('path', 'variant'), [
    pytest.param(*run, marks=[pytest.mark.slow] * any(
        name in run[0] for name in ('medium', 'figure', 'bench')))
    for run in sorted(NETS.values())])
def test_every_net_trains_one_step(path, variant):
  config = shrink(load(path, variant))
  recipe = step_lib.make_recipe(config)
  old = jax.jit(lambda: step_lib.init_state(recipe))()  # one program for both compiles longer
  tokens = jax.random.randint(jax.random.key(0), (4, 16), 0, 64)
  new, metrics = jax.jit(lambda *args: step_lib.train_step(recipe, *args))(old, tokens)
  # An encoder's loss is a sum over masked tokens with weights 1/t: ln 64 on average, much noise.
  tolerance = 2.0 if config.model.architecture == 'encoder' else 0.2
  assert abs(float(metrics['nats_per_token']) - math.log(64)) < tolerance
  for name, before in jax.tree.leaves_with_path(old.params):
    after = functools.reduce(lambda tree, part: tree[part.key], name, new.params)
    assert np.isfinite(after).all() and (after != before).any(), jax.tree_util.keystr(name)


@pytest.mark.parametrize('path', ['configs/paper/figure2a.py', 'configs/paper/figure2b.py'])
def test_the_orders_of_figure_2(path):
  rows = {}
  for variant in FILES[path]['VARIANTS']:
    order = load(path, variant).order
    draw = orders.make(order.name, **order.options()).sample(jax.random.key(0), 32, 16)
    rows[variant] = np.asarray(draw)
    assert (np.sort(draw, axis=1) == np.arange(16)).all()
  same_in_all_rows = {variant for variant, draw in rows.items() if (draw == draw[0]).all()}
  assert same_in_all_rows == set(rows) - {'any_order', 'mixture'}
  assert len({draw.tobytes() for draw in rows.values()}) == len(rows)
  assert (rows['left_to_right'] == np.arange(16)).all()
  if 'blockwise' in rows:
    assert rows['blockwise'][0].tolist() == [4 * b + i for b in range(4) for i in (0, 2, 3, 1)]


def parse(command: list[str]) -> Config:
  """What main makes of these flags."""
  values = flags.FlagValues()
  flag = config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=command)
  for name in ('workdir', 'mode', 'suite'):
    flags.DEFINE_string(name, None, '', flag_values=values)
  values(command)
  return config_lib.from_dict(flag.value)


@pytest.mark.parametrize('path', sorted(FILES))
def test_the_docstring_names_its_command_its_variants_and_flags_that_parse(path, monkeypatch):
  monkeypatch.chdir(ROOT)
  text = FILES[path]['__doc__']
  variants = FILES[path].get('VARIANTS', ())
  commands = re.findall(r'^ +python -m aogpt_jax\.main ((?:.*\\\n)*.*)$', text, re.MULTILINE)
  assert commands
  for command in commands:
    parts = shlex.split(command)
    named, _, variant = parts[0].removeprefix('--config=').partition(':')
    assert named == path and variant in ('', *variants)
    assert any(part.startswith(('--workdir=runs/', '--mode=bench')) for part in parts)
    assert parse(['main', *parts]) == load(path, variant or (*variants, '')[0])
  for variant in variants:
    assert re.search(rf'\b{re.escape(variant)}\b', text), f'{variant} is not explained'
  for override in re.findall(r'--config\.[\w.]+=\w+', text):
    name, value = override.removeprefix('--config.').split('=')
    changed = config_lib.flatten(parse(['main', f'--config={path}', override]))
    assert str(changed[name]) == value


@pytest.mark.parametrize('path', sorted(FILES))
def test_it_states_only_differences_from_the_defaults(path, monkeypatch):
  """Every field that it assigns differs from the default, in some variant at least."""
  idle, useful = set(), set()
  assign = ml_collections.ConfigDict.__setattr__
  for _, variant in (run for run in RUNS if run[0] == path):
    config = config_lib.default()
    sections = {id(config[name]): name for name in config}

    def record(self, name, value, sections=sections):
      (idle if self[name] == value else useful).add(f'{sections[id(self)]}.{name}')
      assign(self, name, value)

    with monkeypatch.context() as patch:
      patch.setattr(config_lib, 'default', lambda config=config: config)
      patch.setattr(ml_collections.ConfigDict, '__setattr__', record)
      get_config(path, variant)
  assert useful and not idle - useful


@pytest.mark.parametrize('path', sorted(FILES))
def test_variants_are_declared_and_others_refused(path):
  get_config, variants = FILES[path]['get_config'], FILES[path].get('VARIANTS')
  if variants is None:
    assert get_config.__code__.co_argcount == 0
    return
  assert get_config.__defaults__ == (variants[0],)
  with pytest.raises(UserError) as error:
    get_config('wrong')
  assert "variant='wrong'" in str(error.value)
  assert all(repr(variant) in str(error.value) for variant in variants)


@pytest.mark.parametrize(('config', 'message'), [
    ('configs/small.py:papre',
     "variant='papre': not one of ('paper', 'released'); did you mean \"paper\"?"),
    ('configs/quickstart.py:fast', 'this file has no variants'),
])
def test_an_unknown_variant_is_one_line_and_exit_code_2(config, message, tmp_path):
  command = [sys.executable, '-m', 'aogpt_jax.main', f'--config={config}', f'--workdir={tmp_path}']
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert result.returncode == 2
  (line,) = result.stderr.splitlines()
  assert line.startswith('error: --config: ') and message in line
