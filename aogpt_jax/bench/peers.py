"""The other side: GPT-2 of Hugging Face in PyTorch, of the same sizes, with random weights.

PyTorch is imported here alone, and only when a function is called.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from aogpt_jax.config import Config, ModelConfig
from aogpt_jax.data import workers
from aogpt_jax.errors import UserError


class Pending(NamedTuple):
  """What a run returns: `jax.block_until_ready` waits for it as for an array of jax."""

  value: Any

  def block_until_ready(self) -> 'Pending':
    """Waits for all that was queued on PyTorch's device."""
    import torch
    if torch.cuda.is_available():
      torch.cuda.synchronize()
    return self


def check() -> None:
  """Raises UserError, before any device is touched, unless PyTorch and transformers are there."""
  try:
    import torch  # noqa: F401
    import transformers
  except ImportError as error:
    raise UserError(f"--peer=gpt2: {error.name} is not installed; pip install -e '.[bench]', or "
                    'leave the other side out with --peer=none') from None
  transformers.logging.set_verbosity_error()


def _device() -> str:
  """Where PyTorch runs: on the kind of device that jax does, or not at all.

  Raises:
    UserError: for a jax on an accelerator that PyTorch does not reach: that would be no match.
  """
  import torch
  if jax.default_backend() == 'cpu':
    return 'cpu'
  if jax.default_backend() in ('gpu', 'cuda') and torch.cuda.is_available():
    return 'cuda'
  raise UserError(f'--peer=gpt2: jax runs on {jax.default_backend()}, and this PyTorch on a CPU '
                  'alone; leave the other side out with --peer=none')


def describe() -> dict[str, Any]:
  """Versions, device and threads; gives PyTorch every core that this process may use."""
  import torch
  import transformers
  torch.set_num_threads(workers.count_cores())
  return {'torch': torch.__version__, 'transformers': transformers.__version__,
          'device': _device(), 'threads': torch.get_num_threads()}


def make(config: ModelConfig) -> Any:
  """GPT2LMHeadModel with layers, heads, width, context and vocabulary of `config`; no dropout.

  Its head is the token embedding, as always in GPT-2; attention is PyTorch's fused one (sdpa).
  """
  import torch
  import transformers
  torch.manual_seed(0)
  sizes = transformers.GPT2Config(
      vocab_size=config.vocab_size, n_positions=config.context_length, n_embd=config.embed_dim,
      n_layer=config.num_layers, n_head=config.num_heads, resid_pdrop=0.0, embd_pdrop=0.0,
      attn_pdrop=0.0, bos_token_id=0, eos_token_id=None, attn_implementation='sdpa')
  return transformers.GPT2LMHeadModel(sizes).to(_device())


def _autocast(config: ModelConfig) -> Any:
  """model.dtype as PyTorch does it: weights stay float32, matmuls take bfloat16."""
  import torch
  return torch.autocast(_device(), torch.bfloat16, enabled=config.dtype == 'bfloat16')


def _adamw(parameters: Any, config: Config) -> tuple[Any, str]:
  """AdamW in one kernel where this PyTorch has it for the device, else over lists; its name."""
  import torch
  c = config.optimizer
  options = dict(lr=c.learning_rate, betas=(c.b1, c.b2), eps=c.eps, weight_decay=c.weight_decay)
  try:
    return torch.optim.AdamW(parameters, fused=True, **options), 'fused AdamW'
  except RuntimeError:
    return torch.optim.AdamW(parameters, foreach=True, **options), 'foreach AdamW'


def train_step(config: Config, tokens: np.ndarray) -> tuple[Callable[[], Pending], str, int]:
  """Forward, backward, clipping and AdamW on the same batch again and again.

  Args:
    config: sizes, optimiser and micro-batches.
    tokens: (B, n) int32.

  Returns:
    The run, the name of its optimiser, and the number of parameters.
  """
  import torch
  model = make(config.model).train()
  parameters = list(model.parameters())
  optimizer, name = _adamw(parameters, config)
  ids = torch.from_numpy(tokens.astype(np.int64)).to(_device())
  micro = ids.chunk(config.train.accumulation)

  def run() -> Pending:
    optimizer.zero_grad(set_to_none=True)
    for part in micro:
      with _autocast(config.model):
        loss = model(part, labels=part).loss
      (loss / len(micro)).backward()
    if config.optimizer.clip_norm:
      torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
    optimizer.step()
    return Pending(loss.detach())
  return run, name, sum(p.numel() for p in parameters)


def generation(config: ModelConfig, batch: int, temperature: float, top_p: float,
               ) -> Callable[[], Pending]:
  """Continues `batch` texts of one token to context_length with a cache, as a user would."""
  import torch
  model = make(config).eval()
  begin = torch.zeros((batch, 1), dtype=torch.int64, device=_device())
  new = config.context_length - 1
  law = (dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=0) if temperature
         else dict(do_sample=False))

  def run() -> Pending:
    with torch.inference_mode(), _autocast(config):
      return Pending(model.generate(
          begin, attention_mask=torch.ones_like(begin), max_new_tokens=new, min_new_tokens=new,
          use_cache=True, **law))
  return run


def scoring(config: ModelConfig, tokens: np.ndarray) -> Callable[[], Pending]:
  """The loss of a batch (B, n) int32, forward only."""
  import torch
  model = make(config).eval()
  ids = torch.from_numpy(tokens.astype(np.int64)).to(_device())

  def run() -> Pending:
    with torch.inference_mode(), _autocast(config):
      return Pending(model(ids, labels=ids).loss)
  return run
