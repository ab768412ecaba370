"""What a training step will take, from XLA's plan of it: nothing is allocated and nothing run."""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax import sharding as sharding_lib
from aogpt_jax.config import Config
from aogpt_jax.training import step as step_lib


class Plan(NamedTuple):
  """XLA's plan of one training step, bytes on one device.

  state: abstract TrainState. argument_bytes: state and batch. temporary_bytes: activations,
  gradients and all else that lives within a step. lower_seconds, compile_seconds: what it took.
  """

  state: step_lib.TrainState
  argument_bytes: int
  temporary_bytes: int
  lower_seconds: float
  compile_seconds: float


def abstract_state(config: Config) -> step_lib.TrainState:
  """The state of a run as shapes."""
  recipe = step_lib.make_recipe(config)
  return jax.eval_shape(lambda: step_lib.init_state(recipe))


def plan_step(config: Config, mesh: jax.sharding.Mesh, quick: bool = True) -> Plan:
  """Compiles the step of a config for a mesh.

  Args:
    config: of the run.
    mesh: its devices.
    quick: leave out LLVM's optimisations, which come after the plan, where the device is a CPU.
  """
  recipe, abstract = step_lib.make_recipe(config), abstract_state(config)
  shardings = sharding_lib.state_shardings(mesh, abstract)
  tokens = jax.ShapeDtypeStruct((config.train.batch_size, config.model.context_length), jnp.int32)
  start = time.perf_counter()
  lowered = step_lib.jit_step(recipe, shardings, sharding_lib.batch_sharding(mesh)).lower(
      abstract, tokens)
  middle = time.perf_counter()
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  compiled = lowered.compile(
      {'xla_backend_optimization_level': '0'} if quick and on_cpu else None)
  memory = compiled.memory_analysis()
  return Plan(abstract, memory.argument_size_in_bytes, memory.temp_size_in_bytes,
              middle - start, time.perf_counter() - middle)


def state_bytes(mesh: jax.sharding.Mesh, state: step_lib.TrainState) -> dict[str, tuple[int, int]]:
  """Bytes of weights, EMA and optimiser: in all, and on one device, from the shards' shapes."""
  def of(tree: Any) -> tuple[int, int]:
    rows = sharding_lib.placements(mesh, tree)
    return sum(r.num_bytes for r in rows), sum(r.device_bytes for r in rows)
  return {'weights': of(state.params), 'EMA': of(state.ema), 'optimizer': of(state.opt_state)}


def counted_flops(config: Config) -> float:
  """FLOPs of forward and backward in one step, as XLA counts those of the program as traced.

  XLA counts the body of a loop once, so the loops are taken out: layers are written out, one and
  two of them (the second costs what every further one does), the loss is not chunked, and a
  micro-batch is counted once and multiplied. Dense attention, without remat: the model's own FLOPs.
  """
  rows, length = config.train.batch_size // config.train.accumulation, config.model.context_length

  def of_layers(num_layers: int) -> float:
    model = dataclasses.replace(config.model, num_layers=num_layers, scan_layers=False,
                                loss_chunk=0, attention='dense', remat='none')
    train = dataclasses.replace(config.train, batch_size=rows, accumulation=1)
    recipe = step_lib.make_recipe(dataclasses.replace(config, model=model, train=train))
    params = jax.eval_shape(lambda: step_lib.init_state(recipe)).params
    draws = jax.eval_shape(lambda: step_lib.draw(recipe, jnp.int32(0), rows, length))

    def loss(params, tokens, draws):
      net = nnx.merge(recipe.graphdef, params)
      return step_lib.objective.loss_terms(net, tokens, draws, None).sum()

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, tokens, draws)
    return lowered.cost_analysis()['flops']

  one, two = of_layers(1), of_layers(2)
  return config.train.accumulation * (one + (config.model.num_layers - 1) * (two - one))
