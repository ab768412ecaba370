"""The reference's weights and what the reference computes with them."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import interop, objective
from aogpt_jax.errors import UserError


def _params(arrays):
  return {k.removeprefix('param/'): a for k, a in arrays.items() if k.startswith('param/')}


@pytest.fixture(scope='module', params=['aogpt_bias', 'aogpt_nobias'])
def case(request, golden):
  """Golden arrays and the model with their weights."""
  arrays = golden(request.param)
  config = json.loads(str(arrays['config']))
  return arrays, interop.from_reference_arrays(config, _params(arrays))


@pytest.mark.parametrize('length', ['full', 'short'])
def test_logits_and_losses_of_the_reference(case, length):
  """Both orders, n = context and n < context; the short one fails if lengths are hard-coded."""
  arrays, model = case
  want = {name: arrays[f'{length}/{name}']
          for name in ('logits', 'nll', 'loss', 'ar_nll', 'ar_loss')}
  tokens, orders = (jnp.asarray(arrays[f'{length}/{name}'], jnp.int32)
                    for name in ('tokens', 'orders'))
  identity = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def run(tokens, orders):
    return (model(tokens, orders), objective.token_nll(model, tokens, orders),
            objective.ao_ar_loss(model, tokens, orders))

  logits, nll, loss = run(tokens, orders)
  _, ar_nll, ar_loss = run(tokens, identity)
  got = {'logits': logits, 'nll': nll, 'loss': loss, 'ar_nll': ar_nll, 'ar_loss': ar_loss}
  chex.assert_trees_all_close(got, want, rtol=0, atol=1e-4)
  assert np.abs(want['logits']).max() > 0.3  # 1e-4 is far below what there is to get wrong


def test_model_config_translates_every_argument():
  """The names of the reference; `changes` win."""
  reference = dict(vocab_size=64, block_size=32, n_layer=3, n_head=2, n_embd=8, bias=True,
                   dropout=0.25)
  config = interop.model_config(reference, loss_chunk=5)
  assert (config.vocab_size, config.context_length, config.num_layers, config.num_heads,
          config.embed_dim, config.use_bias, config.dropout_rate, config.loss_chunk) == (
              64, 32, 3, 2, 8, True, 0.25, 5)
  assert interop.model_config(reference, dropout_rate=0.0).dropout_rate == 0


def test_every_misfit_is_named_in_one_error(golden):
  """A missing, an unknown and a mis-shaped tensor: one message with names and both shapes."""
  arrays = golden('aogpt_nobias')
  config, params = json.loads(str(arrays['config'])), _params(arrays)
  del params['transformer.h.1.mlp.c_fc.weight']
  params['transformer.h.3.ln_1.weight'] = np.zeros(32)
  params['lm_head.weight'] = np.zeros((61, 16))
  with pytest.raises(UserError) as error:
    interop.from_reference_arrays(config, params)
  for part in ('transformer.h.1.mlp.c_fc.weight is missing (expected (128, 32))',
               'transformer.h.3.ln_1.weight (32,) is not a tensor of this model',
               'lm_head.weight has shape (61, 16), expected (61, 32)'):
    assert part in str(error.value)
  assert str(error.value).count(';') == 2  # and nothing else


def test_transposed_tensors_are_refused(golden):
  """A weight stored (in, out) is not reshaped in silence although its size fits."""
  arrays = golden('aogpt_nobias')
  params = _params(arrays)
  name = 'transformer.h.0.mlp.c_fc.weight'
  params[name] = params[name].T
  with pytest.raises(UserError, match=r'c_fc.weight has shape \(32, 128\), expected \(128, 32\)'):
    interop.from_reference_arrays(json.loads(str(arrays['config'])), params)
