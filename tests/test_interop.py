"""The reference's weights, its checkpoint files, and what it computes with them."""

import json
import math
import os
import pathlib
import pickle
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import aogpt_jax
from aogpt_jax import config as config_lib, interop, objective
from aogpt_jax.config import ModelConfig
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT

CHECKPOINT = pathlib.Path(__file__).parent / 'golden' / 'reference_checkpoint.pt'


def _params(arrays):
  return {k.removeprefix('param/'): a for k, a in arrays.items() if k.startswith('param/')}


@pytest.fixture(scope='module', params=['aogpt_bias', 'aogpt_nobias',
                                        'sigmagpt_bias', 'sigmagpt_nobias'])
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


def test_a_head_that_is_not_tied_is_refused(golden):
  """σ-GPT has one tensor under two names; two different ones are some other model."""
  arrays = golden('sigmagpt_nobias')
  params = _params(arrays)
  params['lm_head.weight'] = params['lm_head.weight'] + 1
  with pytest.raises(UserError, match='lm_head.weight differs from transformer.wte.weight'):
    interop.from_reference_arrays(json.loads(str(arrays['config'])), params)


def _checkpoint():
  return torch.load(CHECKPOINT, weights_only=True)


def _write(path, checkpoint):
  torch.save(checkpoint, path)
  return path


def _sigma_checkpoint(golden):
  """A file of a σ-GPT as the reference writes it: the tied tensor once in shadow_params."""
  arrays = golden('sigmagpt_bias')
  state = {name: torch.from_numpy(a) for name, a in _params(arrays).items()}
  state['lm_head.weight'] = state['transformer.wte.weight']
  shadow = [t / 2 for name, t in state.items() if name != 'lm_head.weight']
  return {'model': state, 'model_args': json.loads(str(arrays['config'])), 'iter_num': 7,
          'ema_rate': 0.99, 'config': {},
          'ema_model': {'decay': 0.99, 'num_updates': 7, 'shadow_params': shadow}}


def _assert_weights(model, want):
  got = interop.to_reference_arrays(model)
  assert list(got) == list(want)
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize(('ema', 'part'), [(False, 'final/'), (True, 'ema/')])
def test_a_file_of_the_reference_has_the_weights_of_its_training(golden, ema, part):
  """Raw and averaged, exactly; the averaged ones are a list without names in the file."""
  want = {k.removeprefix(part): a for k, a in golden('train_trace').items() if k.startswith(part)}
  _assert_weights(interop.load_reference(CHECKPOINT, ema=ema), want)


def test_load_gives_a_language_model_of_ids():
  """Step, averaged weights by default, and texts that are ids."""
  lm, raw = aogpt_jax.load(CHECKPOINT), aogpt_jax.load(str(CHECKPOINT), ema=False)
  assert lm.step == 12 and lm.config.model == lm.model.config
  _assert_weights(lm.model, interop.to_reference_arrays(interop.load_reference(CHECKPOINT)))
  assert not np.array_equal(raw.model.head.bias[...], lm.model.head.bias[...])
  assert config_lib.from_json(config_lib.to_json(lm.config)) == lm.config
  text = lm.infill('3 17 <mask:2> 5', seed=1)[0]
  ids = lm.tokenizer.encode(text).tolist()
  assert len(ids) == 5 and ids[:2] == [3, 17] and ids[4] == 5
  score, = lm.score([text])
  assert score.num_tokens == 5 and 0 < score.nats < 100
  for template in ('3<mask:2> 5', '3 <mask:2>5', '3 <mask><mask>'):  # would run into each other
    with pytest.raises(UserError, match='has no space between a hole and its neighbour'):
      lm.infill(template)
  with pytest.raises(UserError, match='"three" is not an id'):
    lm.infill('three <mask>')


@pytest.mark.parametrize('sigma', [False, True])
def test_load_and_save_give_the_same_file_back(golden, tmp_path, sigma):
  """Names, their order, dtypes and every bit, of the model and of its average."""
  source = _write(tmp_path / 'x.pt', _sigma_checkpoint(golden) if sigma else _checkpoint())
  reference = interop.read_reference(source)
  interop.save_reference(reference.model(ema=False), tmp_path / 'made' / 'y.pt',
                         reference.model(ema=True), reference.step,
                         reference.config.optimizer.ema_decay)
  old, new = (torch.load(p, weights_only=True) for p in (source, tmp_path / 'made' / 'y.pt'))
  assert list(new['model']) == list(old['model'])
  assert {**old['model_args']} == new['model_args'] and new['config'] == {}
  for key in ('iter_num', 'ema_rate'):
    assert new[key] == old[key]
  for key in ('decay', 'num_updates'):
    assert new['ema_model'][key] == old['ema_model'][key]
  pairs = [*zip(new['model'].values(), old['model'].values(), strict=True),
           *zip(new['ema_model']['shadow_params'], old['ema_model']['shadow_params'], strict=True)]
  for ours, theirs in pairs:
    assert ours.dtype == theirs.dtype and ours.is_contiguous()
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
  heads = [new['model'][name].data_ptr() for name in ('transformer.wte.weight', 'lm_head.weight')]
  assert (heads[0] == heads[1]) == sigma
  assert [p.name for p in (tmp_path / 'made').iterdir()] == ['y.pt']  # no unfinished file


def test_save_without_an_average_writes_the_raw_weights_twice(tmp_path):
  raw = interop.load_reference(CHECKPOINT, ema=False)
  interop.save_reference(raw, tmp_path / 'y.pt')
  _assert_weights(interop.load_reference(tmp_path / 'y.pt'), interop.to_reference_arrays(raw))


@pytest.mark.parametrize('change', ['bare', 'compiled', 'no average'])
def test_what_a_file_may_lack_or_prefix(tmp_path, change):
  """Only the model and its arguments are needed; compiled runs prefix every key."""
  checkpoint, want = _checkpoint(), interop.load_reference(CHECKPOINT, ema=False)
  if change == 'bare':
    checkpoint = {name: checkpoint[name] for name in ('model', 'model_args')}
  if change == 'compiled':
    checkpoint['model'] = {f'_orig_mod.{name}': t for name, t in checkpoint['model'].items()}
  if change == 'no average':
    checkpoint['ema_model'] = None
  path = _write(tmp_path / 'x.pt', checkpoint)
  _assert_weights(interop.load_reference(path, ema=False), interop.to_reference_arrays(want))
  assert interop.read_reference(path).step == (0 if change == 'bare' else 12)
  if change == 'compiled':
    interop.load_reference(path)
  else:
    with pytest.raises(UserError, match=r'x.pt: has no averaged weights .* ema=False'):
      interop.load_reference(path)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_widths_become_float32(tmp_path, dtype):
  checkpoint = _checkpoint()
  checkpoint['model'] = {name: t.to(dtype) for name, t in checkpoint['model'].items()}
  model = interop.load_reference(_write(tmp_path / 'x.pt', checkpoint), ema=False)
  assert model.head.kernel[...].dtype == np.float32
  _assert_weights(model, {name: t.float().numpy() for name, t in checkpoint['model'].items()})


def _damage(checkpoint, change):
  """Applies one change that makes a file of the reference unusable."""
  shadow, state = checkpoint['ema_model']['shadow_params'], checkpoint['model']
  if change == 'no model_args':
    del checkpoint['model_args']
  if change == 'no n_head':
    del checkpoint['model_args']['n_head']
  if change == 'text n_head':
    checkpoint['model_args']['n_head'] = 'two'
  if change == 'code':
    checkpoint['config'] = pathlib.PurePosixPath('x')
  if change == 'few shadows':
    shadow.pop()
  if change == 'bad shadow':
    shadow[3] = torch.zeros(2, 32)
  if change == 'no shadows':
    del checkpoint['ema_model']['shadow_params']
  if change == 'fraction':
    checkpoint['model_args']['n_layer'] = 2.5
  if change == 'nan layers':
    checkpoint['model_args']['n_layer'] = math.nan
  if change == 'broken':
    state['lm_head.bias'][3] = math.nan
  if change == 'sparse':
    state['lm_head.bias'] = state['lm_head.bias'].to_sparse()
  if change == 'integers':
    state['lm_head.bias'] = torch.zeros(61, dtype=torch.int64)
  if change == 'missing':
    del state['transformer.h.1.adaLN.1.bias']
  if change == 'list':
    return [checkpoint]
  return checkpoint


@pytest.mark.parametrize(('change', 'message'), [
    ('no model_args', "not a checkpoint of the reference: it has no dict 'model_args'"),
    ('list', "it has no dict 'model'"), ('no n_head', 'model_args has no n_head'),
    ('text n_head', "model_args.n_head='two': must be a finite number"),
    ('fraction', 'model_args.n_layer=2.5: must be a finite number, and a whole one'),
    ('nan layers', 'model_args.n_layer=nan: must be a finite number'),
    ('broken', 'lm_head.bias holds nan or inf'),
    ('sparse', 'lm_head.bias must be a dense tensor with data'),
    ('code', 'holds pathlib.PurePosixPath, which is neither a tensor nor plain data'),
    ('few shadows', 'shadow_params has 50 tensors, but the model has 51 parameters'),
    ('bad shadow', 'shadow_params: .*wnonee.weight has shape .2, 32., expected .1, 32.'),
    ('no shadows', 'ema_model has no list shadow_params'),
    ('integers', 'lm_head.bias must be a tensor of floats, not torch.int64'),
    ('missing', r'transformer.h.1.adaLN.1.bias is missing \(expected \(192,\)\)')])
def test_a_file_that_does_not_fit_is_one_line(tmp_path, change, message):
  path = _write(tmp_path / 'x.pt', _damage(_checkpoint(), change))
  with pytest.raises(UserError, match=message) as error:
    interop.load_reference(path)
  assert str(error.value).startswith(f'{path}: ') and '\n' not in str(error.value)


@pytest.mark.parametrize(('content', 'message'), [
    (None, 'no such file'), (b'', 'cannot be read as a PyTorch checkpoint'),
    (b'hello world', 'cannot be read'), ('half', 'cannot be read'), ('pickle', 'cannot be read'),
    ('flipped', 'the checksum of .* in it is wrong')])
def test_a_damaged_file_is_one_line(tmp_path, content, message):
  """Cut short, of another kind, or with one byte flipped, which torch does not notice."""
  path, whole = tmp_path / 'x.pt', bytearray(CHECKPOINT.read_bytes())
  middle = len(whole) // 2
  if content == 'half':
    content = whole[:middle]
  if content == 'pickle':
    content = pickle.dumps({'model': {}})
  if content == 'flipped':
    whole[middle] ^= 1
    content = whole
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError, match=message) as error:
    aogpt_jax.load(path)
  assert '\n' not in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize('sigma', [False, True])
def test_a_cropped_context_changes_nothing_within_it(golden, tmp_path, sigma):
  path = _write(tmp_path / 'x.pt', _sigma_checkpoint(golden) if sigma else _checkpoint())
  whole, cropped = interop.load_reference(path), interop.load_reference(path, context_length=9)
  assert cropped.config.context_length == 9
  assert cropped.position_embedding.embedding.shape[0] == 10
  assert cropped.target_embedding.embedding.shape[0] == 9
  rng = np.random.default_rng(0)
  tokens = rng.integers(61, size=(2, 9), dtype=np.int32)
  orders = rng.permuted(np.tile(np.arange(9, dtype=np.int32), (2, 1)), axis=1)
  np.testing.assert_allclose(cropped(tokens, orders), whole(tokens, orders), rtol=0, atol=1e-6)
  for bad in (0, 17):
    with pytest.raises(UserError, match=f'context_length={bad}: must be in 1..16'):
      interop.load_reference(path, context_length=bad)


@pytest.mark.parametrize(('changes', 'field'), [
    ({'target_injection': 'every_block'}, 'target_injection'), ({'qk_norm': False}, 'qk_norm'),
    ({'position_encoding': 'target_rotary'}, 'position_encoding'),
    ({'condition_dim': 64}, 'condition_dim'), ({'norm': 'layernorm'}, 'norm'),
    (interop.SIGMA_GPT | {'qk_norm': True}, 'qk_norm')])
def test_a_model_that_the_reference_lacks_cannot_be_written(tmp_path, changes, field):
  config = ModelConfig(**(dict(vocab_size=11, context_length=4, num_layers=1, num_heads=2,
                               embed_dim=8) | changes))
  model = nnx.eval_shape(lambda: AOGPT(config, rngs=nnx.Rngs(0)))
  with pytest.raises(UserError, match=f'^model.{field}=.* in a reference checkpoint'):
    interop.save_reference(model, tmp_path / 'y.pt')
  assert not (tmp_path / 'y.pt').exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
  """The old file stays, whole, and no unfinished one is left behind."""
  model = interop.load_reference(CHECKPOINT)
  path = _write(tmp_path / 'y.pt', {'old': 1})

  def full(*unused):
    raise OSError(28, os.strerror(28))
  monkeypatch.setattr(os, 'replace', full)
  with pytest.raises(UserError, match='y.pt: cannot be written: No space left'):
    interop.save_reference(model, path)
  assert torch.load(path) == {'old': 1} and [p.name for p in tmp_path.iterdir()] == ['y.pt']


def test_without_torch_files_name_the_extra(monkeypatch):
  monkeypatch.setitem(sys.modules, 'torch', None)
  with pytest.raises(UserError, match=r"pip install 'aogpt_jax\[torch\]'"):
    interop.load_reference(CHECKPOINT)
