"""The tensors of the authors' PyTorch checkpoints: names and shapes as facts, none of their code.

A reference linear stores (out, in); ours (in, out), with heads and modulation rows as own axes.
One table, `tensor_table`, serves both directions. No torch here; files are read in `interop`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax.config import ModelConfig, check
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT

# What the reference has no argument for, in its two model files.
AO_GPT = dict(target_injection='adaln', condition_dim=128, norm='rmsnorm', qk_norm=True,
              tie_embeddings=False, head_bias=True, initializer='truncated_normal')
SIGMA_GPT = dict(target_injection='input', norm='layernorm', qk_norm=False,
                 tie_embeddings=True, head_bias=False, initializer='normal')

ARGUMENTS = {  # model_args -> ModelConfig, in the reference's order
    'block_size': ('context_length', int), 'vocab_size': ('vocab_size', int),
    'n_layer': ('num_layers', int), 'n_head': ('num_heads', int), 'n_embd': ('embed_dim', int),
    'dropout': ('dropout_rate', float), 'bias': ('use_bias', bool)}
TOKENS, HEAD = 'transformer.wte.weight', 'lm_head.weight'  # one tensor where the head is tied


class Tensor(NamedTuple):
  """One reference tensor and its place here.

  path, layer: the array in our parameter tree, and its row there; None for all of the array.
  shape: of the reference. ours: of the array here, or of its row. transposed: a linear's weight.
  """

  path: tuple[str, ...]
  shape: tuple[int, ...]
  ours: tuple[int, ...]
  transposed: bool = False
  layer: int | None = None

  def from_reference(self, array: np.ndarray) -> np.ndarray:
    return (array.T if self.transposed else array).reshape(self.ours)

  def to_reference(self, array: np.ndarray) -> np.ndarray:
    return array.reshape(self.shape[::-1]).T if self.transposed else array.reshape(self.shape)


def _finite(value: Any) -> bool:
  return isinstance(value, (int, float)) and math.isfinite(value)


def model_config(reference: Mapping[str, Any], **changes: Any) -> ModelConfig:
  """Translates the reference's model_args (n_layer, n_head, …); `changes` win.

  AO-GPT by default; `model_config(args, **SIGMA_GPT)` for a σ-GPT.

  Raises:
    UserError: for an argument that is missing, no number, or impossible.
  """
  missing = [name for name in ARGUMENTS if name not in reference and name != 'dropout']
  if missing:
    raise UserError(f'model_args has no {", ".join(missing)}')
  fields = {}
  for name, (field, kind) in ARGUMENTS.items():
    value = reference.get(name, 0.0)
    whole = kind is float or value == round(value) if _finite(value) else False
    check(whole, f'model_args.{name}', value,
          'must be a finite number' + ('' if kind is float else ', and a whole one'))
    fields[field] = kind(value)
  return ModelConfig(**(fields | changes))


def variant(names: Iterable[str]) -> dict[str, Any]:
  """The reference's model that has tensors of these names."""
  return AO_GPT if any('adaLN' in name for name in names) else SIGMA_GPT


def _check_expressible(config: ModelConfig) -> None:
  variants = {v['target_injection']: v for v in (AO_GPT, SIGMA_GPT)}
  rule = 'must be {!r} in a reference checkpoint; other models cannot be expressed in one'
  check(config.architecture == 'decoder', 'model.architecture', config.architecture,
        rule.format('decoder'))
  check(config.target_injection in variants, 'model.target_injection', config.target_injection,
        "must be 'adaln' (AO-GPT) or 'input' (σ-GPT) in a reference checkpoint; other models "
        'cannot be expressed in one')
  for field, value in {'position_encoding': 'learned', **variants[config.target_injection]}.items():
    if field != 'initializer':  # says how weights began, not what they are
      check(getattr(config, field) == value, f'model.{field}', getattr(config, field),
            rule.format(value))


def _embedding(name, path, rows, width):
  return {f'{name}.weight': Tensor((path, 'embedding'), (rows, width), (rows, width))}


def _norm(name, path, width, bias=False):
  leaves = {'weight': 'scale', 'bias': 'bias'} if bias else {'weight': 'scale'}
  return {f'{name}.{leaf}': Tensor((*path, ours), (width,), (width,))
          for leaf, ours in leaves.items()}


def _linear(name, path, bias, inputs, outputs, out_shape, in_shape=None):
  """A reference linear (outputs, inputs) as our kernel (*in_shape, *out_shape)."""
  kernel = (*(in_shape or (inputs,)), *out_shape)
  tensors = {f'{name}.weight': Tensor((*path, 'kernel'), (outputs, inputs), kernel, True)}
  if bias:
    tensors[f'{name}.bias'] = Tensor((*path, 'bias'), (outputs,), out_shape)
  return tensors


def _layer_tensors(config: ModelConfig) -> dict[str, Tensor]:
  """The tensors of one reference layer by their name after 'transformer.h.i.'."""
  d, bias, heads = config.embed_dim, config.use_bias, (config.num_heads, config.head_dim)
  norm_bias = bias and config.norm == 'layernorm'
  return (
      _norm('ln_1', ('norm1',), d, norm_bias)
      | _linear('attn.c_attn', ('attention', 'qkv'), bias, d, 3 * d, (3, *heads))
      | _linear('attn.c_proj', ('attention', 'out'), bias, d, d, (d,), heads)
      | (_norm('attn.q_norm', ('attention', 'q_norm'), config.head_dim) if config.qk_norm else {})
      | (_norm('attn.k_norm', ('attention', 'k_norm'), config.head_dim) if config.qk_norm else {})
      | _norm('ln_2', ('norm2',), d, norm_bias)
      | _linear('mlp.c_fc', ('up',), bias, d, 4 * d, (4 * d,))
      | _linear('mlp.c_proj', ('down',), bias, 4 * d, d, (d,))
      | (_linear('adaLN.1', ('modulation',), True, config.condition_dim, 6 * d, (6, d))
         if config.target_injection == 'adaln' else {}))


def tensor_table(config: ModelConfig) -> dict[str, Tensor]:
  """Every tensor by its reference name, in the order of a reference state dict.

  A tied head is listed under both of its names, as there.
  """
  _check_expressible(config)
  d, n, v, adaln = (config.embed_dim, config.context_length, config.vocab_size,
                    config.target_injection == 'adaln')
  c = config.condition_dim if adaln else d
  first = (_embedding('transformer.wte', 'token_embedding', v, d)
           | _embedding('transformer.wpe', 'position_embedding', n + 1, d)
           | _embedding('transformer.wtpe', 'target_embedding', n, c)
           | _embedding('transformer.wnonee', 'none_embedding', 1, d))
  layers = {f'transformer.h.{i}.{name}': t._replace(path=('blocks', *t.path), layer=i)
            for i in range(config.num_layers) for name, t in _layer_tensors(config).items()}
  if not adaln:
    return (first | layers | _norm('transformer.ln_f', ('final_norm',), d, config.use_bias)
            | {HEAD: first[TOKENS]})
  return (first | layers | _norm('transformer.final_layer.ln_f', ('final_norm',), d)
          | _linear('transformer.final_layer.adaLN_final.1', ('final_modulation',), True, c, 2 * d,
                    (2, d))
          | _linear('lm_head', ('head',), True, d, v, (v,)))


def check_names(expected: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
  problems = [f'{name} is missing (expected {t.shape})'
              for name, t in expected.items() if name not in arrays]
  problems += [f'{name} {np.shape(a)} is not a tensor of this model'
               for name, a in arrays.items() if name not in expected]
  problems += [f'{name} has shape {np.shape(arrays[name])}, expected {t.shape}'
               for name, t in expected.items()
               if name in arrays and np.shape(arrays[name]) != t.shape]
  if problems:
    raise UserError('reference tensors do not fit the model: ' + '; '.join(problems))


def params_from_reference(config: ModelConfig, arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns our parameter tree (nested dict of float32 arrays) from named reference tensors.

  Args:
    config: the model that the tensors belong to, AO-GPT or σ-GPT.
    arrays: reference tensor name -> array; PyTorch's (out, in) layout for linears.

  Raises:
    UserError: naming every missing, unknown or mis-shaped tensor with both shapes, a tied pair
      that is not equal, or a model that the reference does not have.
  """
  table = tensor_table(config)
  check_names(table, arrays)
  if config.tie_embeddings and not np.array_equal(arrays[TOKENS], arrays[HEAD], equal_nan=True):
    raise UserError(f'{HEAD} differs from {TOKENS}, but a σ-GPT ties them: one tensor')
  flat = {}
  for name, t in table.items():
    array = t.from_reference(np.asarray(arrays[name], np.float32))
    if t.layer is None:
      flat[t.path] = array
    else:
      flat.setdefault(t.path, []).append(array)
  tree = {}
  for path, array in flat.items():
    node = tree
    for part in path[:-1]:
      node = node.setdefault(part, {})
    # A copy: jax would otherwise read on in the memory of the caller, or of a file.
    node[path[-1]] = jnp.array(np.stack(array) if isinstance(array, list) else array, copy=True)
  return tree


def from_reference_arrays(config: Mapping[str, Any] | ModelConfig,
                          arrays: Mapping[str, Any]) -> AOGPT:
  """Builds an AOGPT with the given reference weights; needs no torch.

  Args:
    config: the reference's model_args dict (AO-GPT and σ-GPT are told apart by the names of the
      tensors), or a ModelConfig.
    arrays: reference tensor name -> array.

  Raises:
    UserError: as `model_config` and `params_from_reference`.
  """
  if not isinstance(config, ModelConfig):
    config = model_config(config, **variant(arrays))
  params = params_from_reference(config, arrays)
  abstract = nnx.eval_shape(lambda: AOGPT(config, rngs=nnx.Rngs(0)))
  graphdef, shapes = nnx.split(abstract)
  if jax.tree.structure(nnx.to_pure_dict(shapes)) != jax.tree.structure(params):
    raise AssertionError('the tensor table does not cover the parameters of the model')
  return nnx.merge(graphdef, params)


def to_reference_arrays(model: AOGPT) -> dict[str, np.ndarray]:
  """The inverse of `from_reference_arrays`: float32 copies by reference name, in its order.

  Raises:
    UserError: for a model that the reference does not have, naming the config field.
  """
  table = tensor_table(model.config)
  params = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  arrays = {}
  for name, t in table.items():
    array = params
    for part in t.path:
      array = array[part]
    array = array if t.layer is None else array[t.layer]
    arrays[name] = np.array(t.to_reference(array), np.float32, order='C')
  return arrays
