"""Devices as a mesh data × fsdp × tensor, and where every array lies on it.

Modules know nothing of this: one table maps parameter paths to PartitionSpecs, XLA does the rest.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from aogpt_jax.config import MeshConfig
from aogpt_jax.errors import UserError

AXES = ('data', 'fsdp', 'tensor')

# (end of the parameter path, spec of its axes). Stacked layers have their layer axis first.
RULES = (
    (r'token_embedding/embedding', P('tensor', 'fsdp')),
    (r'position_embedding/embedding|none_embedding/embedding', P(None, 'fsdp')),
    (r'blocks/target_embedding/embedding', P(None, None, 'fsdp')),  # L, n, d
    (r'target_embedding/embedding', P(None, 'fsdp')),
    (r'attention/qkv/kernel', P(None, 'fsdp', None, 'tensor', None)),  # L, d, 3, H, K
    (r'attention/qkv/bias', P(None, None, 'tensor', None)),
    (r'attention/out/kernel', P(None, 'tensor', None, 'fsdp')),  # L, H, K, d
    (r'up/kernel', P(None, 'fsdp', 'tensor')),  # L, d, 4d
    (r'up/bias', P(None, 'tensor')),
    (r'down/kernel', P(None, 'tensor', 'fsdp')),  # L, 4d, d
    (r'blocks/modulation/kernel', P(None, None, None, 'fsdp')),  # L, c, 6, d
    (r'final_modulation/kernel', P(None, None, 'fsdp')),  # c, 2, d
    (r'head/kernel', P('fsdp', 'tensor')),
    (r'head/bias', P('tensor')),
    (r'bias|scale', P()),
)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """Lays all devices out as data × fsdp × tensor.

  Raises:
    UserError: if the axis sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = [config.data, config.fsdp, config.tensor]
  if -1 in sizes:
    known = -int(np.prod(sizes))
    sizes[sizes.index(-1)] = max(1, len(devices) // known)
  if np.prod(sizes) != len(devices):
    raise UserError(f'mesh data×fsdp×tensor={sizes}: the product is {np.prod(sizes)}, but there '
                    f'are {len(devices)} devices; set one of mesh.data, mesh.fsdp, mesh.tensor '
                    'to -1')
  return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def check_batch(mesh: Mesh, field: str, rows: int) -> None:
  """Raises UserError unless `rows` divides evenly over the data and fsdp axes."""
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  if rows % ways:
    below = rows // ways * ways
    nearest = f'{below} and {below + ways}' if below else ways
    raise UserError(f'{field}={rows}: rows are split over data×fsdp={ways} devices, so it must be '
                    f'a multiple of {ways}; the nearest: {nearest}')


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows of a (B, …) array over the data and fsdp axes."""
  return NamedSharding(mesh, P(('data', 'fsdp')))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def _path_name(path: Any) -> str:
  return '/'.join(str(getattr(part, 'key', getattr(part, 'name', getattr(part, 'idx', part))))
                  for part in path)


def param_spec(path: str) -> P:
  """PartitionSpec of the parameter at 'blocks/attention/qkv/kernel', by the first rule that fits.

  Raises:
    KeyError: for a path that no rule covers, so that a new parameter is never replicated unseen.
  """
  for pattern, spec in RULES:
    if re.search(f'(^|/)({pattern})$', path):
      return spec
  raise KeyError(f'no partition rule for parameter {path}')


def state_shardings(mesh: Mesh, abstract_state: Any) -> Any:
  """A NamedSharding for every leaf of a TrainState.

  Optimiser moments and EMA mirror the parameter tree, so their paths end like the parameters';
  counters are replicated. An axis that does not divide is replicated too.
  """
  def leaf(path, array):
    spec = param_spec(_path_name(path)) if array.ndim else P()
    spec = [axis if axis and array.shape[i] % mesh.shape[axis] == 0 else None
            for i, axis in enumerate(spec)]
    return NamedSharding(mesh, P(*spec))
  return jax.tree.map_with_path(leaf, abstract_state)


class Placement(NamedTuple):
  """Where one parameter lies: its path, shape, spec, and bytes in all and on one device."""

  path: str
  shape: tuple[int, ...]
  spec: P
  num_bytes: int
  device_bytes: int


def placements(mesh: Mesh, arrays: Any) -> list[Placement]:
  """One a leaf of a tree of parameters, or of another that mirrors it; abstract ones will do."""
  rows, shardings = [], state_shardings(mesh, arrays)
  for (path, array), sharding in zip(jax.tree.leaves_with_path(arrays), jax.tree.leaves(shardings)):
    size = lambda shape, array=array: int(np.prod(shape)) * array.dtype.itemsize
    rows.append(Placement(_path_name(path), array.shape, sharding.spec, size(array.shape),
                          size(sharding.shard_shape(array.shape))))
  return rows


def table(rows: list[Placement]) -> str:
  """Markdown: the partition rules as they fall on a model and a mesh."""
  lines = ['| parameter | shape | spec | bytes | bytes a device |', '|---|---|---|---|---|']
  return '\n'.join(lines + [
      f'| {r.path} | {"×".join(map(str, r.shape))} | {r.spec} | {r.num_bytes:,} | '
      f'{r.device_bytes:,} |' for r in rows])


def describe(mesh: Mesh, params: Any) -> str:
  """Where the weights lie: one line on one device, else the table."""
  if mesh.size == 1:
    return 'partition: one device holds every parameter whole'
  return f'partition over {dict(mesh.shape)}:\n' + table(placements(mesh, params))


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
  """`function`, traced with `mesh` in context, where `constrain_rows` and kernels find it."""
  @functools.wraps(function)
  def traced(*args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return function(*args)
  return traced


def constrain(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
  """Tells XLA how x lies on the mesh in context; x itself where there are not several devices.

  An axis of x that does not divide is left whole.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  size = lambda axes: int(np.prod([mesh.shape[a] for a in np.atleast_1d(axes)]))
  return jax.lax.with_sharding_constraint(x, P(*[
      axes if axes and x.shape[i] % size(axes) == 0 else None for i, axes in enumerate(spec)]))


def constrain_rows(x: jax.Array, axis: int = 0) -> jax.Array:
  """Tells XLA that `axis` of x holds rows of the batch, over data and fsdp.

  XLA's own choice is poor where two axes compete for one mesh axis: rows with the width of the
  weights under fsdp (it would move activations, not weights), micro-batches with their rows.
  """
  return constrain(x, *[None] * axis, ('data', 'fsdp'))


def take_rows(table: jax.Array, index: jax.Array, divided: str | None = None) -> jax.Array:
  """table[index], (rows, …) and (B, T) -> (B, T, …), with the rows of the batch where they belong.

  The table is brought together first, but for a division of its rows over the axis `divided`.
  """
  return constrain_rows(constrain(table, divided)[index])


def host_rows(sharding: NamedSharding, num_rows: int) -> np.ndarray:
  """The rows of a global (num_rows, …) array that lie on this process' devices, increasing.

  Asked of the sharding, not of the process' number: where fsdp or tensor spans hosts, several
  processes hold the same rows, and a mesh may lay out devices in another order than processes.
  """
  local = set(sharding.mesh.local_devices)
  held = [np.arange(num_rows)[index[0]] for device, index
          in sharding.devices_indices_map((num_rows,)).items() if device in local]
  return np.unique(np.concatenate(held))


def global_array(local: np.ndarray, rows: np.ndarray, sharding: NamedSharding, num_rows: int,
                 ) -> jax.Array:
  """Makes one global array of which each process has a part.

  Args:
    local: this process' part, (len(rows), …).
    rows: their numbers in the global array, from `host_rows`.
    sharding: of the global array; rows are its only axis that may be divided.
    num_rows: of the global array.
  """
  def part(index):
    return local[np.searchsorted(rows, np.arange(num_rows)[index[0]])]
  return jax.make_array_from_callback((num_rows, *local.shape[1:]), sharding, part)


def global_array_from_all_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """Makes one global array where every process holds all rows."""
  return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
