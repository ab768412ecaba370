"""The authors' PyTorch checkpoints: tensor names and shapes as facts, none of their code.

A reference linear stores (out, in); ours (in, out), with heads and modulation rows as own axes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT


class Tensor(NamedTuple):
  """One reference tensor: its shape there, and how it becomes the array at `path` here."""

  path: tuple[str, ...]
  shape: tuple[int, ...]
  convert: Callable[[np.ndarray], np.ndarray]


def model_config(reference: Mapping[str, Any], **changes: Any) -> ModelConfig:
  """Translates the reference's model_args (n_layer, n_head, n_embd, block_size, …)."""
  fields = dict(
      vocab_size=int(reference['vocab_size']), context_length=int(reference['block_size']),
      num_layers=int(reference['n_layer']), num_heads=int(reference['n_head']),
      embed_dim=int(reference['n_embd']), use_bias=bool(reference['bias']),
      dropout_rate=float(reference.get('dropout', 0.0)))
  return ModelConfig(**(fields | changes))


def _linear(path, bias, inputs, outputs, out_shape, in_shape=None):
  """A reference linear (outputs, inputs) as our kernel (*in_shape, *out_shape)."""
  kernel_shape = (*(in_shape or (inputs,)), *out_shape)
  tensors = {'weight': Tensor((*path, 'kernel'), (outputs, inputs),
                              lambda a: a.T.reshape(kernel_shape))}
  if bias:
    tensors['bias'] = Tensor((*path, 'bias'), (outputs,), lambda a: a.reshape(out_shape))
  return tensors


def _layer_tensors(config: ModelConfig) -> dict[str, Tensor]:
  """The tensors of one reference layer by their name after 'transformer.h.i.'."""
  d, c, bias = config.embed_dim, config.condition_dim, config.use_bias
  heads, same = (config.num_heads, config.head_dim), lambda a: a
  named = {
      'ln_1': {'weight': Tensor(('norm1', 'scale'), (d,), same)},
      'attn.c_attn': _linear(('attention', 'qkv'), bias, d, 3 * d, (3, *heads)),
      'attn.c_proj': _linear(('attention', 'out'), bias, d, d, (d,), heads),
      'attn.q_norm': {'weight': Tensor(('attention', 'q_norm', 'scale'), heads[1:], same)},
      'attn.k_norm': {'weight': Tensor(('attention', 'k_norm', 'scale'), heads[1:], same)},
      'ln_2': {'weight': Tensor(('norm2', 'scale'), (d,), same)},
      'mlp.c_fc': _linear(('up',), bias, d, 4 * d, (4 * d,)),
      'mlp.c_proj': _linear(('down',), bias, 4 * d, d, (d,)),
      'adaLN.1': _linear(('modulation',), True, c, 6 * d, (6, d)),
  }
  return {f'{module}.{leaf}': t for module, leaves in named.items() for leaf, t in leaves.items()}


def _outer_tensors(config: ModelConfig) -> dict[str, Tensor]:
  """The reference tensors outside the layers, by full name."""
  d, c, n, v = (config.embed_dim, config.condition_dim, config.context_length, config.vocab_size)
  same = lambda a: a
  named = {
      'transformer.wte': {'weight': Tensor(('token_embedding', 'embedding'), (v, d), same)},
      'transformer.wpe': {'weight': Tensor(('position_embedding', 'embedding'), (n + 1, d), same)},
      'transformer.wtpe': {'weight': Tensor(('target_embedding', 'embedding'), (n, c), same)},
      'transformer.wnonee': {'weight': Tensor(('none_embedding', 'embedding'), (1, d), same)},
      'transformer.final_layer.ln_f': {'weight': Tensor(('final_norm', 'scale'), (d,), same)},
      'transformer.final_layer.adaLN_final.1':
          _linear(('final_modulation',), True, c, 2 * d, (2, d)),
      'lm_head': _linear(('head',), True, d, v, (v,)),
  }
  return {f'{module}.{leaf}': t for module, leaves in named.items() for leaf, t in leaves.items()}


def _check_names(expected: dict[str, tuple[int, ...]], arrays: Mapping[str, Any]) -> None:
  problems = [f'{name} is missing (expected {shape})'
              for name, shape in expected.items() if name not in arrays]
  problems += [f'{name} {np.shape(a)} is not a tensor of this model'
               for name, a in arrays.items() if name not in expected]
  problems += [f'{name} has shape {np.shape(arrays[name])}, expected {shape}'
               for name, shape in expected.items()
               if name in arrays and np.shape(arrays[name]) != shape]
  if problems:
    raise UserError('reference tensors do not fit the model: ' + '; '.join(problems))


def params_from_reference(config: ModelConfig, arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns our parameter tree (nested dict of float32 arrays) from named reference tensors.

  Args:
    config: the model that the tensors belong to.
    arrays: reference tensor name -> array; PyTorch's (out, in) layout for linears.

  Raises:
    UserError: naming every missing, unknown or mis-shaped tensor with both shapes.
  """
  layer, outer = _layer_tensors(config), _outer_tensors(config)
  layer_name = 'transformer.h.{}.{}'.format
  expected = {name: t.shape for name, t in outer.items()}
  expected |= {layer_name(i, name): t.shape
               for i in range(config.num_layers) for name, t in layer.items()}
  _check_names(expected, arrays)
  get = lambda name, t: t.convert(np.asarray(arrays[name], np.float32))
  flat = {t.path: get(name, t) for name, t in outer.items()}
  for name, t in layer.items():
    flat[('blocks', *t.path)] = np.stack(
        [get(layer_name(i, name), t) for i in range(config.num_layers)])
  tree = {}
  for path, array in flat.items():
    node = tree
    for part in path[:-1]:
      node = node.setdefault(part, {})
    node[path[-1]] = jnp.asarray(array)
  return tree


def from_reference_arrays(config: Mapping[str, Any] | ModelConfig,
                          arrays: Mapping[str, Any]) -> AOGPT:
  """Builds an AOGPT with the given reference weights; needs no torch.

  Args:
    config: the reference's model_args dict, or a ModelConfig.
    arrays: reference tensor name -> array.

  Raises:
    UserError: as `params_from_reference`.
  """
  if not isinstance(config, ModelConfig):
    config = model_config(config)
  params = params_from_reference(config, arrays)
  abstract = nnx.eval_shape(lambda: AOGPT(config, rngs=nnx.Rngs(0)))
  graphdef, shapes = nnx.split(abstract)
  if jax.tree.structure(nnx.to_pure_dict(shapes)) != jax.tree.structure(params):
    raise AssertionError('the tensor table does not cover the parameters of the model')
  return nnx.merge(graphdef, params)
