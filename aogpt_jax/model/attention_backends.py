"""Attention among the items of a training batch by other means than one dense matrix of scores.

All take query, key and value (B, T, H, K) and return (B, T, H, K): softmax attention with scale
1/sqrt(K) and float32 scores, to rounding what `attention.attend` computes densely. `choose` says
which one serves. cudnn and splash were not run on their hardware here.

Axes: B batch, T items, H heads, K head width.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

log = logging.getLogger(__name__)

BLOCK = 128  # rows of queries in a block of `blocked`, and lanes of a TPU
MAX_BLOCKS = 16  # blocks are written out one by one, so longer sequences take longer blocks
PREFERRED = {'cpu': 'blocked', 'gpu': 'cudnn', 'cuda': 'cudnn', 'rocm': 'dense', 'tpu': 'splash'}


@functools.cache  # once a reason: every layer and every compilation asks anew
def _say(text: str) -> None:
  log.info('%s', text)


def _refusal(name: str, query: jax.Array, causal: bool, cached: bool, platform: str) -> str:
  """Why backend `name` cannot serve; '' if it can."""
  length, width = query.shape[1], query.shape[3]
  needs = {'cudnn': ('gpu', 'cuda'), 'splash': ('tpu',)}.get(name, (platform,))
  if name == 'dense':
    return ''
  if platform not in needs:
    return f'runs on {needs[0]}, and this is {platform}'
  if cached:
    return 'cannot read a cache'
  if name == 'blocked' and not causal:
    return 'is causal, and this is full attention'
  if name == 'cudnn' and query.dtype not in (jnp.bfloat16, jnp.float16):
    return f'takes bfloat16 or float16, and model.dtype is {query.dtype}'
  if name == 'cudnn' and (width % 8 or width > 128):
    return f'takes head widths up to 128 that are multiples of 8, and this is {width}'
  if name == 'splash' and length % BLOCK:
    return f'takes lengths that are multiples of {BLOCK}, and this is {length}'
  return ''


def choose(wanted: str, query: jax.Array, causal: bool, cached: bool, platform: str) -> str:
  """The backend that serves: the one that is wanted, or, said once in the log, dense.

  Args:
    wanted: config.model.attention. 'auto': blocked on a CPU if there are several blocks, as it is
      slower for one (and for a cache) and its rounding is another; cudnn on a GPU; splash on a TPU.
    query: (B, T, H, K); shape and dtype count.
    causal: whether item t sees the items up to t, or all of them.
    cached: whether there are keys and values of earlier items, with masks of their own.
    platform: jax.default_backend().
  """
  name = wanted
  if wanted == 'auto':
    name = PREFERRED.get(platform, 'dense')
    if name == 'blocked' and (cached or not causal or query.shape[1] <= BLOCK):
      return 'dense'
  reason = _refusal(name, query, causal, cached, platform)
  if reason:
    _say(f'attention: dense instead of {name}, which {reason}')
  return 'dense' if reason else name


def _cuts(length: int, block: int) -> list[tuple[int, int]]:
  block = max(block, -(-length // MAX_BLOCKS))
  return [(start, min(start + block, length)) for start in range(0, length, block)]


def _block_scores(query: jax.Array, key: jax.Array, start: int) -> jax.Array:
  """Scores (B, H, rows, items) float32 of the queries from item `start` on; -inf ahead of them."""
  scores = jnp.einsum('bhtk,bhsk->bhts', query, key, preferred_element_type=jnp.float32)
  ahead = jnp.arange(key.shape[2]) > start + jnp.arange(query.shape[2])[:, None]
  return jnp.where(ahead, -jnp.inf, scores * query.shape[-1] ** -0.5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocked(query: jax.Array, key: jax.Array, value: jax.Array, block: int) -> jax.Array:
  """`blocked` with heads before items: (B, H, T, K)."""
  return _blocked_forward(query, key, value, block)[0]


def _blocked_forward(query, key, value, block):
  outs, normalizers = [], []
  for start, end in _cuts(query.shape[2], block):
    scores = _block_scores(query[:, :, start:end], key[:, :, :end], start)
    normalizer = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - normalizer).astype(value.dtype)
    outs.append(jnp.einsum('bhts,bhsk->bhtk', weights, value[:, :, :end]))
    normalizers.append(normalizer)
  out, normalizer = jnp.concatenate(outs, axis=2), jnp.concatenate(normalizers, axis=2)
  return out, (query, key, value, out, normalizer)


def _blocked_backward(block, saved, g):
  query, key, value, out, normalizer = saved
  # With weights w = softmax(s): ds = w * (dw - Σ w dw), and that sum is out · g.
  inner = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(axis=-1, keepdims=True)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  dquery, dkey, dvalue = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(key.shape, jnp.float32)
  for start, end in _cuts(query.shape[2], block):
    rows = (slice(None), slice(None), slice(start, end))
    seen = (slice(None), slice(None), slice(0, end))
    weights = jnp.exp(_block_scores(query[rows], key[seen], start) - normalizer[rows])
    dweights = product('bhtk,bhsk->bhts', g[rows], value[seen])
    dscores = weights * (dweights - inner[rows]) * query.shape[-1] ** -0.5
    dscores = dscores.astype(query.dtype)
    dquery.append(product('bhts,bhsk->bhtk', dscores, key[seen]))
    dkey = dkey.at[seen].add(product('bhts,bhtk->bhsk', dscores, query[rows]))
    dvalue = dvalue.at[seen].add(product('bhts,bhtk->bhsk', weights.astype(g.dtype), g[rows]))
  dquery = jnp.concatenate(dquery, axis=2).astype(query.dtype)
  return dquery, dkey.astype(key.dtype), dvalue.astype(value.dtype)


_blocked.defvjp(_blocked_forward, _blocked_backward)


def blocked(query: jax.Array, key: jax.Array, value: jax.Array, block: int = BLOCK) -> jax.Array:
  """Causal, a block of queries at a time against the items up to its end, for any platform.

  The scores above the diagonal blocks are never computed, and neither pass keeps any: the backward
  pass computes them again from the normalisers (the recipe of FlashAttention, arXiv 2205.14135).
  """
  heads_first = lambda x: jnp.swapaxes(x, 1, 2)
  return heads_first(_blocked(*map(heads_first, (query, key, value)), block))


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
  """cuDNN's fused attention on NVIDIA GPUs; it divides over rows and heads by itself."""
  return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation='cudnn')


def splash(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool,
           interpret: bool = False) -> jax.Array:
  """JAX's splash attention for TPUs, a Pallas kernel; `interpret` runs it on a CPU, for tests.

  XLA cannot divide a kernel: with a mesh in context (see `sharding.on_mesh`) every device runs it
  on its own rows and heads.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as lib  # slow to import

  def local(query, key, value):
    shape = (query.shape[1],) * 2
    mask = lib.CausalMask(shape) if causal else lib.FullMask(shape)
    kernel = lib.make_splash_mha_single_device(
        lib.MultiHeadMask([mask] * query.shape[2]), interpret=interpret)
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    scaled = (query * query.shape[-1] ** -0.5).astype(query.dtype)
    return heads_first(jax.vmap(kernel)(*map(heads_first, (scaled, key, value))))

  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return local(query, key, value)
  heads = 'tensor' if query.shape[2] % mesh.shape['tensor'] == 0 else None
  spec = P(('data', 'fsdp'), None, heads)
  return jax.shard_map(local, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(
      query, key, value)
