"""The authors' PyTorch checkpoint files, read and written; their layout is a fact, not code.

A file is a dict: `model` (state dict; compiled runs prefix every key with `_orig_mod.`),
`model_args`, `iter_num`, `ema_model` with `shadow_params` (a list without names, in the order of
the state dict; a tied head is not in it), `ema_rate`, `optimizer`, `config`. Only files need torch,
an extra of the package; arrays by the reference's names (`from_reference_arrays`) do not.
"""

import dataclasses
import os
import pathlib
import re
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from aogpt_jax.config import Config, DataConfig, OptimizerConfig, check
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT
from aogpt_jax.reference_tensors import (
  AO_GPT,
  ARGUMENTS,
  HEAD,
  SIGMA_GPT,
  TOKENS,
  Tensor,
  check_names,
  from_reference_arrays,
  model_config,
  params_from_reference,
  tensor_table,
  to_reference_arrays,
  variant,
)

__all__ = ['AO_GPT', 'SIGMA_GPT', 'Reference', 'from_reference_arrays', 'load_reference',
           'model_config', 'params_from_reference', 'read_reference', 'save_reference',
           'to_reference_arrays']

_PREFIX = '_orig_mod.'


class Reference(NamedTuple):
  """What a checkpoint file holds, but for the state of its optimiser.

  raw, ema: reference tensor name -> float32 array; ema is None where the file has no average.
  """

  path: pathlib.Path
  config: Config
  step: int
  raw: dict[str, np.ndarray]
  ema: dict[str, np.ndarray] | None

  def model(self, ema: bool) -> AOGPT:
    """Builds the model; UserError if the averaged weights are asked for and not there."""
    if ema and self.ema is None:
      raise UserError(f'{self.path}: has no averaged weights (no ema_model); load it with '
                      'ema=False for the raw ones')
    return from_reference_arrays(self.config.model, self.ema if ema else self.raw)


def _import_torch():
  try:
    import torch
  except ImportError:
    raise UserError('PyTorch checkpoints are read and written with torch, which is not installed; '
                    "pip install 'aogpt_jax[torch]'") from None
  return torch


def _read_file(path: pathlib.Path) -> Any:
  """What torch.save wrote, with tensors mapped from the file where its format allows that."""
  torch = _import_torch()
  if not path.is_file():
    raise UserError(f'{path}: {"is a directory" if path.is_dir() else "no such file"}; expected '
                    'a PyTorch checkpoint')
  try:
    is_zip = zipfile.is_zipfile(path)
    if is_zip and (broken := zipfile.ZipFile(path).testzip()):  # torch checks no checksum itself
      raise UserError(f'{path}: damaged: the checksum of {broken} in it is wrong; copy it again')
    with warnings.catch_warnings(action='ignore'):
      return torch.load(path, map_location='cpu', weights_only=True, mmap=is_zip)
  except UserError:
    raise
  except Exception as error:  # torch and zipfile raise many kinds
    if refused := re.search(r'GLOBAL (\S+)', str(error)):
      raise UserError(f'{path}: holds {refused[1]}, which is neither a tensor nor plain data; '
                      'loading that can run any code, so it is refused; save the file again '
                      'without it') from None
    reason = error.strerror if isinstance(error, OSError) else 'damaged, cut short, or another file'
    raise UserError(f'{path}: cannot be read as a PyTorch checkpoint: {reason}') from None


def _to_numpy(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Float tensors of any width as float32 arrays; those of float32 are views."""
  torch = _import_torch()
  for name, t in tensors.items():
    if not (isinstance(t, torch.Tensor) and t.is_floating_point()):
      raise UserError(f'{name} must be a tensor of floats, not {getattr(t, "dtype", type(t))}')
    if t.layout != torch.strided or t.is_meta:
      raise UserError(f'{name} must be a dense tensor with data, not {t.layout} on {t.device}')
    if not t.isfinite().all():
      raise UserError(f'{name} holds nan or inf: these weights are of a run that broke')
  return {name: t.detach().float().numpy() for name, t in tensors.items()}


def _ema_arrays(checkpoint: dict[str, Any], table: dict[str, Tensor], names: list[str],
                ) -> dict[str, np.ndarray] | None:
  """Names the averaged tensors; None without them."""
  if checkpoint.get('ema_model') is None:
    return None
  average = checkpoint['ema_model']
  shadow = average.get('shadow_params') if isinstance(average, dict) else None
  if not isinstance(shadow, list):
    raise UserError('ema_model has no list shadow_params')
  tied = table[HEAD] == table[TOKENS]
  names = [name for name in names if not (tied and name == HEAD)]
  if len(shadow) != len(names):
    raise UserError(f'ema_model.shadow_params has {len(shadow)} tensors, but the model has '
                    f'{len(names)} parameters')
  try:
    arrays = _to_numpy(dict(zip(names, shadow)))
    if tied:
      arrays[HEAD] = arrays[TOKENS]
    check_names(table, arrays)
  except UserError as error:
    raise UserError(f'ema_model.shadow_params: {error}') from None
  return arrays


def _crop(arrays: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
  rows = {'transformer.wpe.weight': length + 1, 'transformer.wtpe.weight': length}
  return {name: a[:rows.get(name)] for name, a in arrays.items()}


def _parse(path: pathlib.Path, checkpoint: Any, context_length: int | None) -> Reference:
  for name in ('model', 'model_args'):
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(name), dict):
      raise UserError(f"not a checkpoint of the reference: it has no dict '{name}'")
  state = {str(name): t for name, t in checkpoint['model'].items()}
  if all(name.startswith(_PREFIX) for name in state):
    state = {name.removeprefix(_PREFIX): t for name, t in state.items()}
  raw = _to_numpy(state)
  config = model_config(checkpoint['model_args'], **variant(raw))
  table = tensor_table(config)
  check_names(table, raw)
  ema = _ema_arrays(checkpoint, table, list(raw))
  if context_length is not None:
    check(1 <= context_length <= config.context_length, 'context_length', context_length,
          f'must be in 1..{config.context_length}, the context of the file')
    config = dataclasses.replace(config, context_length=context_length)
    raw, ema = _crop(raw, context_length), ema and _crop(ema, context_length)
  step, decay = checkpoint.get('iter_num', 0), checkpoint.get('ema_rate', 0.9999)
  check(type(step) is int and 0 <= step < 2**31, 'iter_num', step, 'must be a number of steps')
  check(isinstance(decay, (int, float)), 'ema_rate', decay, 'must be a number')
  run = Config(  # of a run whose data is not known: its texts are ids
      model=config, data=DataConfig(train='', validation='', tokenizer='ids'),
      optimizer=OptimizerConfig(ema_decay=float(decay)))
  return Reference(path, run, step, raw, ema)


def read_reference(path: str | os.PathLike[str], context_length: int | None = None) -> Reference:
  """Reads a checkpoint file of the reference, AO-GPT or σ-GPT, without its optimiser state.

  Tensors may be float16, bfloat16 or float64; `optimizer`, `ema_model`, `ema_rate`, `iter_num` and
  `config` may be missing. No code in the file is run.

  Args:
    path: the file.
    context_length: keeps the positions below it; None: all.

  Raises:
    UserError: if torch is not installed; if the file is missing, damaged, no such checkpoint, or
      holds other objects than tensors and plain data; for tensors that do not fit its model_args
      (all are named, with both shapes); for a context_length longer than the file's.
  """
  path = pathlib.Path(path)
  checkpoint = _read_file(path)
  try:
    return _parse(path, checkpoint, context_length)
  except UserError as error:
    raise UserError(f'{path}: {error}') from None


def load_reference(path: str | os.PathLike[str], ema: bool = True,
                   context_length: int | None = None) -> AOGPT:
  """Loads the model of a checkpoint file; `aogpt_jax.load` adds its step and a tokenizer of ids.

  Args:
    path: the file.
    ema: the averaged weights, which the paper evaluates, or the raw ones.
    context_length: as in `read_reference`.

  Raises:
    UserError: as `read_reference`, and for ema=True on a file without averaged weights.
  """
  return read_reference(path, context_length).model(ema)


def save_reference(model: AOGPT, path: str | os.PathLike[str], ema: AOGPT | None = None,
                   step: int = 0, ema_decay: float = 0.9999) -> None:
  """Writes a checkpoint file that the reference can load, at once or not at all.

  It holds no `optimizer`: sampling and evaluation work, continued training starts a new one.

  Args:
    model: with the raw weights; AO-GPT or σ-GPT.
    path: the file; its directory is made. An existing file is replaced.
    ema: the model with the averaged weights; None: the raw ones stand for them.
    step: number of updates.
    ema_decay: of the average, for the reference to continue it.

  Raises:
    UserError: for a model that the reference does not have, an `ema` of another config, a file
      that cannot be written, or if torch is not installed.
  """
  torch = _import_torch()
  if ema is not None and ema.config != model.config:
    raise UserError('the averaged weights are of a model with another config')
  state = {name: torch.from_numpy(a) for name, a in to_reference_arrays(model).items()}
  average = {} if ema is None else to_reference_arrays(ema)
  shadow = [torch.from_numpy(average[name]) if average else t.clone() for name, t in state.items()
            if not (model.config.tie_embeddings and name == HEAD)]
  if model.config.tie_embeddings:
    state[HEAD] = state[TOKENS]
  arguments = {name: getattr(model.config, field) for name, (field, _) in ARGUMENTS.items()}
  checkpoint = {
      'model': state, 'model_args': arguments, 'iter_num': step, 'config': {},
      'ema_rate': ema_decay,
      'ema_model': {'decay': ema_decay, 'num_updates': step, 'shadow_params': shadow}}
  path = pathlib.Path(path)
  unfinished = path.with_name(f'{path.name}.tmp-{os.getpid()}')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.touch()  # the system's own reason, if it cannot be written; torch's is unreadable
    torch.save(checkpoint, unfinished)
    os.replace(unfinished, path)
  except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
    raise UserError(f'{path}: cannot be written: '
                    f'{getattr(error, "strerror", None) or str(error).splitlines()[0]}') from None
  finally:
    unfinished.unlink(missing_ok=True)
