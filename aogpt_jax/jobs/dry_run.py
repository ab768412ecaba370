"""--mode=train --dry_run: what a run will take of every device, before it takes anything."""

import jax

from aogpt_jax import sharding as sharding_lib
from aogpt_jax.config import Config
from aogpt_jax.jobs import train
from aogpt_jax.training import plan as plan_lib, telemetry


def _memory(mesh: jax.sharding.Mesh, plan: plan_lib.Plan) -> str:
  rows = [*plan_lib.state_bytes(mesh, plan.state).items()]
  rows.append(('state', tuple(map(sum, zip(*(size for _, size in rows))))))
  lines = ['| | bytes | bytes a device | whole / device |', '|---|---|---|---|']
  lines += [f'| {name} | {whole:,} | {part:,} | {whole / part:.2f} |'
            for name, (whole, part) in rows]
  total = plan.argument_bytes + plan.temporary_bytes
  return '\n'.join([*lines,
                    f'| activations and gradients | | {plan.temporary_bytes:,} | |',
                    f'| all of it | | {total:,} | |'])


def _flops(config: Config) -> str:
  c, tokens = config.model, config.train.batch_size * config.model.context_length
  formula, counted = tokens * telemetry.flops_per_token(c), plan_lib.counted_flops(config)
  return '\n'.join([
      '| FLOPs a step | |', '|---|---|',
      f'| 6·N·D + 12·L·n·d·D, D = {tokens:,} tokens | {formula:.4g} |',
      f'| XLA, forward and backward | {counted:.4g} |',
      f'| XLA / formula | {counted / formula:.3f} |'])


def run(config: Config) -> None:
  """Prints parameters, partition table, memory and FLOPs; reads no data and writes nothing.

  Raises:
    UserError: if the mesh does not fit the devices, or the batches the mesh.
  """
  mesh = train.check_mesh(config)
  device = mesh.devices.flat[0]
  plan = plan_lib.plan_step(config, mesh)
  params = plan.state.params
  micro = config.train.batch_size // config.train.accumulation
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  print(f'{sum(p.size for p in jax.tree.leaves(params)):,} parameters\n')
  print(f'mesh {dict(mesh.shape)}: {mesh.size} × {device.device_kind}; {config.train.accumulation} '
        f'micro-batches of {micro} rows, {micro // ways} on a device; remat {config.model.remat}\n')
  print(sharding_lib.table(sharding_lib.placements(mesh, params)) + '\n')
  print(_memory(mesh, plan) + '\n')
  print(_flops(config) + '\n')
  print(f'The memory is XLA\'s plan for {device.platform}, another platform\'s differs; traced in '
        f'{plan.lower_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s. Nothing was run.')
