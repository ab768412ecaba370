"""GPT-2 of Hugging Face has the sizes of the config, and does all that a step does."""

import dataclasses

import jax
import numpy as np
import pytest

from aogpt_jax import config as config_lib
from aogpt_jax.bench import peers, training
from aogpt_jax.errors import UserError
from aogpt_jax.training import plan as plan_lib

CONFIG = config_lib.from_dict({
    'model': dict(vocab_size=48, context_length=16, num_layers=3, num_heads=2, embed_dim=8),
    'train': dict(batch_size=4, accumulation=2), 'optimizer': dict(learning_rate=1e-2)})


def test_jax_on_an_accelerator_is_not_compared_with_pytorch_on_a_cpu(monkeypatch):
  pytest.importorskip('torch')
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  with pytest.raises(UserError, match='--peer=gpt2: jax runs on tpu, and this PyTorch on a CPU'):
    peers._device()


@pytest.fixture
def torch():
  pytest.importorskip('transformers')
  return pytest.importorskip('torch')


def test_its_shapes_are_those_of_the_config(torch):
  model = peers.make(CONFIG.model)
  shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
  assert shapes['transformer.wte.weight'] == (48, 8)
  assert shapes['transformer.wpe.weight'] == (16, 8)
  assert sum(name.endswith('attn.c_attn.weight') for name in shapes) == 3
  assert shapes['transformer.h.2.mlp.c_fc.weight'] == (8, 32)
  assert 'lm_head.weight' not in shapes  # tied
  c = model.config
  assert c.n_head == 2 and c._attn_implementation == 'sdpa'
  assert c.resid_pdrop == c.embd_pdrop == c.attn_pdrop == 0
  # Ours has a row more for the last position, and one for the item that nothing precedes.
  ours = plan_lib.abstract_state(dataclasses.replace(
      CONFIG, model=training.gpt_model(CONFIG.model),
      order=config_lib.OrderConfig('left_to_right')))
  assert sum(p.size for p in jax.tree.leaves(ours.params)) == (
      sum(p.numel() for p in model.parameters()) + 2 * 8)


def test_its_step_learns_the_batch(torch):
  run, name, count = peers.train_step(CONFIG, training.random_tokens(CONFIG, 4))
  losses = [run().value.item() for _ in range(8)]
  assert losses[-1] < losses[0] - 0.05 and name == 'fused AdamW' and count > 0


def test_it_writes_whole_texts_and_scores_them(torch):
  tokens = peers.generation(CONFIG.model, 3, 0.9, 0.95)().value
  assert tokens.shape == (3, 16) and len({tuple(t) for t in tokens.tolist()}) == 3
  loss = peers.scoring(CONFIG.model, np.asarray(tokens, np.int32))().value.item()
  assert abs(loss - np.log(48)) < 0.3
