"""The other decoders of the paper: where the target enters, a textbook GPT, a tied head."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aogpt_jax.model import AOGPT, ModelConfig

N = 8


@functools.cache
def _model(**changes):
  return AOGPT(ModelConfig(**(dict(
      vocab_size=11, context_length=N, num_layers=2, num_heads=2, embed_dim=16, condition_dim=8,
      use_bias=True, init_std=0.4) | changes)), rngs=nnx.Rngs(1))


def _batch(rows):
  rng = np.random.default_rng(0)
  order = np.tile(np.arange(N, dtype=np.int32), (rows, 1))
  return rng.integers(0, 11, (rows, N)).astype(np.int32), rng.permuted(order, axis=1)


def _shapes(model):
  return {'/'.join(map(str, path)): leaf.shape
          for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize(('injection', 'tables'), [
    ('adaln', {'target_embedding/embedding': (N, 8), 'blocks/modulation/kernel': (2, 8, 6, 16),
               'blocks/modulation/bias': (2, 6, 16), 'final_modulation/kernel': (8, 2, 16),
               'final_modulation/bias': (2, 16)}),
    ('input', {'target_embedding/embedding': (N, 16)}),
    ('every_block', {'target_embedding/embedding': (N, 16)}),
    ('every_block_distinct', {'blocks/target_embedding/embedding': (2, N, 16)}),
    ('none', {})])
def test_an_injection_brings_its_own_tables_and_no_other(injection, tables):
  """Everything else is the same; a table left over would be trained on nothing."""
  shapes = _shapes(_model(target_injection=injection))
  mine = {name: shape for name, shape in shapes.items() if 'target' in name or 'modulation' in name}
  assert mine == tables and len(shapes) - len(mine) == 18


def test_target_embeddings_enter_once_or_at_every_block():
  """A block that does nothing passes the sum on: one, L equal or L different target rows."""
  tokens, orders = _batch(2)
  added_by = {
      'input': lambda params: params['target_embedding', 'embedding'],
      'every_block': lambda params: 2 * params['target_embedding', 'embedding'],
      'every_block_distinct':
          lambda params: params['blocks', 'target_embedding', 'embedding'].sum(axis=0),
      'none': lambda params: jnp.zeros((N, 16))}
  for injection, added in added_by.items():
    graphdef, params = nnx.split(_model(target_injection=injection))
    params = nnx.traversals.flatten_mapping(nnx.to_pure_dict(params))
    for name in (('attention', 'out'), ('down',)):
      for leaf in ('kernel', 'bias'):
        path = ('blocks', *name, leaf)
        params[path] = jnp.zeros_like(params[path])
    model = nnx.merge(graphdef, nnx.traversals.unflatten_mapping(params))
    position = np.pad(orders[:, :-1] + 1, ((0, 0), (1, 0)))
    token = np.pad(np.take_along_axis(tokens, orders, 1)[:, :-1], ((0, 0), (1, 0)))
    x = jnp.where(position[..., None] == 0, model.none_embedding.embedding[0],
                  model.token_embedding.embedding[token])
    x = x + model.position_embedding.embedding[position] + added(params)[orders]
    chex.assert_trees_all_close(model.hidden(tokens, orders), model.final_norm(x), rtol=0,
                                atol=1e-5)


def _textbook_gpt(params, tokens, num_heads):
  """GPT-2 in plain jax.numpy: pre-norm blocks, causal attention, erf GELU, tied head.

  `tokens` (B, n) follow a start symbol; returns logits (B, n, V), row t from the tokens before t.
  """
  def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-5) * p['scale'] + p['bias']

  batch, n = tokens.shape
  wte, wpe = params['token_embedding']['embedding'], params['position_embedding']['embedding']
  d = wte.shape[1]
  start = jnp.broadcast_to(params['none_embedding']['embedding'], (batch, 1, d))
  x = jnp.concatenate([start, wte[tokens[:, :-1]]], axis=1) + wpe[:n]
  blocks = params['blocks']
  for i in range(blocks['up']['kernel'].shape[0]):
    p = jax.tree.map(lambda a, i=i: a[i], blocks)
    y = layer_norm(x, p['norm1'])
    qkv = y @ p['attention']['qkv']['kernel'].reshape(d, 3 * d)
    qkv = qkv + p['attention']['qkv']['bias'].reshape(-1)
    mixed = []
    for head in range(num_heads):
      width = d // num_heads
      q, k, v = (qkv[..., part * d + head * width:part * d + (head + 1) * width]
                 for part in range(3))
      scores = q @ jnp.swapaxes(k, 1, 2) / math.sqrt(width)
      future = jnp.arange(n)[None, :] > jnp.arange(n)[:, None]
      weights = jnp.exp(jnp.where(future, -1e30, scores - scores.max(-1, keepdims=True)))
      mixed.append(weights / weights.sum(-1, keepdims=True) @ v)
    x = x + jnp.concatenate(mixed, -1) @ p['attention']['out']['kernel'].reshape(d, d)
    x = x + p['attention']['out']['bias']
    y = layer_norm(x, p['norm2']) @ p['up']['kernel'] + p['up']['bias']
    y = y * 0.5 * (1 + jax.scipy.special.erf(y / math.sqrt(2)))
    x = x + y @ p['down']['kernel'] + p['down']['bias']
  return layer_norm(x, params['final_norm']) @ wte.T


def test_left_to_right_gpt_is_the_textbook_s_decoder():
  """Layernorm, no qk-norm, tied head, no target: logits equal, all parameters in use."""
  model = nnx.clone(_model(target_injection='none', norm='layernorm', qk_norm=False,
                           tie_embeddings=True, head_bias=False))
  params = nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  rng = np.random.default_rng(0)
  params = {path: value if path[-1] in ('kernel', 'embedding') else
            jnp.asarray(rng.normal(1.0 if path[-1] == 'scale' else 0.0, 0.3, value.shape),
                        jnp.float32)
            for path, value in params.items()}  # scales and biases that are not 1 and 0
  params = nnx.traversals.unflatten_mapping(params)
  model = nnx.merge(nnx.graphdef(model), params)
  tokens = rng.integers(0, 11, (3, N)).astype(np.int32)
  identity = np.tile(np.arange(N, dtype=np.int32), (3, 1))
  want = jax.jit(functools.partial(_textbook_gpt, num_heads=2))(params, tokens)
  got = jax.jit(model.__call__)(tokens, identity)
  chex.assert_trees_all_close(got, want, rtol=0, atol=2e-5)
  assert len(jax.tree.leaves(params)) == 17  # 3 tables, 12 of the blocks, 2 of the final norm


def test_tied_head_reads_the_token_table():
  """No head parameters; logits are hidden states times the token table."""
  model = _model(tie_embeddings=True, head_bias=False)
  assert not any(name.startswith('head') for name in _shapes(model))
  tokens, orders = _batch(2)
  hidden = model.hidden(tokens, orders)
  want = hidden @ model.token_embedding.embedding[...].T
  chex.assert_trees_all_close(model(tokens, orders), want, rtol=0, atol=1e-4)
  assert 'head/bias' not in _shapes(_model(head_bias=False))
