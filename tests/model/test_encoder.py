"""The masked encoder: what it sees, its parameters, its positions, its tied head."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import model as model_lib
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, MaskedEncoder, ModelConfig

ENCODINGS = ('learned', 'rotary')
V, N = 11, 8


@functools.cache
def _model(**changes):
  return model_lib.make(ModelConfig(**(dict(
      architecture='encoder', target_injection='none', vocab_size=V, context_length=N, num_layers=2,
      num_heads=2, embed_dim=16, rotary_base=20.0, init_std=0.4) | changes)), rngs=nnx.Rngs(1))


@functools.cache
def _logits(**changes):
  return jax.jit(_model(**changes).__call__)


def test_make_builds_the_architecture_of_the_config():
  assert type(_model()) is MaskedEncoder
  decoder = model_lib.make(ModelConfig(vocab_size=V, context_length=N, num_layers=1, num_heads=2,
                                       embed_dim=16), rngs=nnx.Rngs(0))
  assert type(decoder) is AOGPT


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_logits_see_every_known_token_and_no_masked_one(encoding):
  """Gradients of each position's logits by the token table, with a token of its own everywhere.

  Full attention: every position sees every known token, before and after it; a masked token is
  seen by none, itself included, since all that enters in its place is the [MASK] row.
  """
  graphdef, params = nnx.split(_model(position_encoding=encoding))
  mix = jax.random.normal(jax.random.key(0), (V,))
  tokens = np.random.default_rng(0).permutation(V)[:N].astype(np.int32)
  masked = np.array([0, 1, 1, 0, 0, 1, 0, 1], bool)

  @jax.jit
  def influence(table):
    def mixed(table):
      state = nnx.to_pure_dict(params)
      state['token_embedding']['embedding'] = table
      return (nnx.merge(graphdef, state)(tokens[None], masked[None])[0] * mix).sum(axis=-1)
    return jnp.abs(jax.jacrev(mixed)(table)).max(axis=-1)

  seen = influence(nnx.to_pure_dict(params)['token_embedding']['embedding'])
  chex.assert_shape(seen, (N, V + 1))
  np.testing.assert_array_equal(seen[:, tokens] != 0, np.tile(~masked, (N, 1)))
  assert (seen[:, V] != 0).all()  # the [MASK] row


def test_tokens_under_a_mask_are_ignored():
  """Any ids there give the same logits, to the bit."""
  tokens = np.random.default_rng(1).integers(0, V, (2, N)).astype(np.int32)
  first_three = np.tile(np.arange(N) < 3, (2, 1))
  garbage = np.where(first_three, (tokens + 1) % V, tokens)
  chex.assert_trees_all_equal(_logits()(tokens, first_three), _logits()(garbage, first_three))


def test_rotary_is_relative_and_has_no_table():
  """Positions shifted by five give the same hidden states; turned around, other ones."""
  model = _model(position_encoding='rotary')
  assert not hasattr(model, 'position_embedding')
  tokens = np.array([[3, 9, 1, 4]], np.int32)
  masked = np.array([[False, True, False, True]])
  graphdef, params = nnx.split(model)

  def run(shift):
    model = nnx.merge(graphdef, params)
    position = jnp.arange(4)[None] + shift
    x = model.token_embedding(jnp.where(masked, V, tokens))
    return model.run_blocks(x, position, position, None, None)

  chex.assert_trees_all_close(run(0), run(5), rtol=0, atol=1e-4)
  swapped = _logits(position_encoding='rotary')(tokens[:, ::-1], masked[:, ::-1])[:, ::-1]
  assert np.abs(swapped - _logits(position_encoding='rotary')(tokens, masked)).max() > 1e-2


@pytest.mark.parametrize('tied', [False, True])
def test_parameters(tied):
  """One row more than the vocabulary for [MASK], none in the head; no target table anywhere."""
  model = _model(tie_embeddings=tied, head_bias=not tied)
  shapes = {'/'.join(map(str, path)): leaf.shape
            for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  want = {'token_embedding/embedding': (V + 1, 16), 'position_embedding/embedding': (N, 16),
          'blocks/norm1/scale': (2, 16), 'blocks/norm2/scale': (2, 16),
          'blocks/attention/qkv/kernel': (2, 16, 3, 2, 8),
          'blocks/attention/q_norm/scale': (2, 8), 'blocks/attention/k_norm/scale': (2, 8),
          'blocks/attention/out/kernel': (2, 2, 8, 16), 'blocks/up/kernel': (2, 16, 64),
          'blocks/down/kernel': (2, 64, 16), 'final_norm/scale': (16,)}
  assert shapes == want | ({} if tied else {'head/kernel': (16, V), 'head/bias': (V,)})
  logits = _logits(tie_embeddings=tied, head_bias=not tied)(
      np.zeros((1, N), np.int32), np.ones((1, N), bool))
  chex.assert_shape(logits, (1, N, V))
  if tied:
    hidden = model.hidden(np.zeros((1, N), np.int32), np.ones((1, N), bool))
    want = hidden @ model.token_embedding.embedding[:V].T
    np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4)


def test_too_long():
  with pytest.raises(UserError, match='length 9: the context_length of this model is 8'):
    _model()(jnp.zeros((1, 9), jnp.int32), jnp.ones((1, 9), bool))
