"""Parallel generation in any order with a key/value cache (paper section 4).

In generation order, with s[i] the position generated i-th and x[i] its token, item i is
(x[i-1], s[i-1], s[i]). The keys and values of an item depend on its target, so item i can be cached
once s[i] is certain to be its successor. A step that reveals k tokens after m known ones runs:

  * the items m' .. m-1 whose tokens the last step revealed (caught up and cached), and
  * k copies of item m with the targets s[m] .. s[m+k-1]. A copy sees the context and itself, no
    other copy; copy 0 is the true item m and is cached.

So n tokens in `steps` steps take 2n - steps items in all.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import keys
from aogpt_jax.config import check
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, Items, MaskedEncoder, make_items
from aogpt_jax.model.attention import Past
from aogpt_jax.model.decoder import NONE_POSITION, Unstacked
from aogpt_jax.sampling import masked
from aogpt_jax.sampling.logits import DEFAULT_RULE, SamplingRule, draw, transform
from aogpt_jax.sampling.schedules import reveal_counts


class Cache(NamedTuple):
  """Keys and values of the items 0 .. length-1: per layer (B, n + G, H, K) each.

  The G slots after the last item take the garbage that a step with fewer than G tokens writes.
  """

  keys: list[jax.Array]
  values: list[jax.Array]
  length: jax.Array


def _empty_cache(model: AOGPT, batch_size: int, slots: int) -> Cache:
  c = model.config
  zeros = lambda: [jnp.zeros((batch_size, slots, c.num_heads, c.head_dim), jnp.dtype(c.dtype))
                   for _ in range(c.num_layers)]
  return Cache(zeros(), zeros(), jnp.int32(0))


def _write(cache: Cache, new: list[tuple[jax.Array, jax.Array]], first: int, last: int,
           slot: jax.Array) -> Cache:
  """Writes the new items [first, last) to the slots from `slot` on."""
  put = lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x[:, first:last], slot, axis=1)
  return cache._replace(keys=[put(old, k) for old, (k, _) in zip(cache.keys, new)],
                        values=[put(old, v) for old, (_, v) in zip(cache.values, new)])


def _prefill(model: AOGPT, layers: Unstacked, cache: Cache, generated: jax.Array,
             orders: jax.Array, length: int) -> Cache:
  """Caches the items 0 .. length-1 of a prompt in one causal pass."""
  items = make_items(generated[:, :length], orders[:, :length])
  _, new = model.extend(items, layers, [None] * model.config.num_layers)
  return _write(cache, new, 0, length, jnp.int32(0))._replace(length=jnp.int32(length))


def _step_items(generated: jax.Array, orders: jax.Array, cached: jax.Array, known: jax.Array,
                group: int) -> Items:
  """The group - 1 catch-up items from `cached` on, then `group` copies of item `known`."""
  last = orders.shape[1] - 1
  index = jnp.concatenate([cached + jnp.arange(group - 1), jnp.full((group,), known)])
  targets = jnp.concatenate([cached + jnp.arange(group - 1), known + jnp.arange(group)])
  before = jnp.clip(index - 1, 0, last)
  position = jnp.where(index == 0, NONE_POSITION, orders[:, before])
  return Items(generated[:, before], position, orders[:, jnp.clip(targets, 0, last)])


def _step_masks(cached: jax.Array, known: jax.Array, group: int, slots: int,
                ) -> tuple[jax.Array, jax.Array]:
  """Who sees what in a step of `_step_items`: cached (T, slots) and new (T, T) bool."""
  catch_up = group - 1
  num_new = catch_up + group
  seen_by_all = jnp.broadcast_to(jnp.arange(slots) < cached, (num_new, slots))
  item = jnp.arange(num_new)
  is_real = (item < catch_up) & (cached + item < known)  # caught up, and not padding
  causal = item[None, :] <= item[:, None]
  return seen_by_all, (causal & is_real[None, :]) | jnp.eye(num_new, dtype=bool)


def _step(model: AOGPT, layers: Unstacked, cache: Cache, generated: jax.Array, orders: jax.Array,
          known: jax.Array, group: int) -> tuple[jax.Array, Cache]:
  """Logits (B, group, V) of the tokens known .. known+group-1, and the cache with item `known`."""
  cached_visible, new_visible = _step_masks(cache.length, known, group, cache.keys[0].shape[1])
  past = [Past(k, v, cached_visible, new_visible) for k, v in zip(cache.keys, cache.values)]
  items = _step_items(generated, orders, cache.length, known, group)
  hidden, new = model.extend(items, layers, past)
  if group > 1:
    cache = _write(cache, new, 0, group - 1, cache.length)
  cache = _write(cache, new, group - 1, group, known)._replace(length=known + 1)
  return model.logits(hidden[:, group - 1:]), cache


def _start(model: AOGPT, generated: jax.Array, orders: jax.Array, prompt_length: int, group: int,
           ) -> tuple[Unstacked, Cache]:
  batch_size, length = orders.shape
  layers = model.unstack()
  cache = _empty_cache(model, batch_size, length + group)
  if prompt_length:
    cache = _prefill(model, layers, cache, generated, orders, prompt_length)
  return layers, cache


@functools.partial(jax.jit, static_argnames=('graphdef', 'rule', 'prompt_length', 'group'))
def _generate(graphdef, params, key, generated, orders, counts, *, rule, prompt_length, group):
  """Fills in `generated` (B, n + group, generation order) from prompt_length on."""
  model = nnx.merge(graphdef, params)
  layers, cache = _start(model, generated, orders, prompt_length, group)
  row_keys = keys.row_keys(key, jnp.arange(orders.shape[0]))
  offsets = jnp.arange(group)

  def draw_row(row_key, row_logits, known):
    token_keys = keys.row_keys(row_key, known + offsets)
    return jax.vmap(draw)(token_keys, row_logits)

  def body(i, carry):
    generated, cache = carry
    known = counts[i]
    logits, cache = _step(model, layers, cache, generated, orders, known, group)
    drawn = jax.vmap(draw_row, (0, 0, None))(row_keys, transform(logits, rule), known)
    # Tokens past this step's count are drawn too; the next step overwrites them.
    return jax.lax.dynamic_update_slice_in_dim(generated, drawn, known, axis=1), cache

  return jax.lax.fori_loop(0, counts.shape[0] - 1, body, (generated, cache))[0]


@functools.partial(jax.jit, static_argnames=('graphdef', 'prompt_length', 'group'))
def _decode_logits(graphdef, params, generated, orders, counts, *, prompt_length, group):
  """Logits (B, n + group, V) of given tokens, step by step through the cache."""
  model = nnx.merge(graphdef, params)
  layers, cache = _start(model, generated, orders, prompt_length, group)
  all_logits = jnp.zeros((*generated.shape, model.config.vocab_size), jnp.float32)

  def body(i, carry):
    all_logits, cache = carry
    logits, cache = _step(model, layers, cache, generated, orders, counts[i], group)
    return jax.lax.dynamic_update_slice_in_dim(all_logits, logits, counts[i], axis=1), cache

  return jax.lax.fori_loop(0, counts.shape[0] - 1, body, (all_logits, cache))[0]


def _check_orders(model: AOGPT | MaskedEncoder, orders: np.ndarray, prompt_length: int) -> None:
  length = orders.shape[1]
  if length > model.config.context_length:
    raise UserError(f'orders of length {length}: the context_length of this model is '
                    f'{model.config.context_length}')
  check(0 <= prompt_length <= length, 'prompt_length', prompt_length, f'must be in 0..{length}')
  if not (np.sort(orders, axis=1) == np.arange(length)).all():
    raise UserError(f'orders: every row must be a permutation of 0..{length - 1}')


def _in_generation_order(tokens: jax.Array, orders: jax.Array, group: int) -> jax.Array:
  """(B, n) in sequence order -> (B, n + group): the tail takes what a last short step draws."""
  return jnp.pad(jnp.take_along_axis(tokens, orders, axis=1), ((0, 0), (0, group)))


def generate(model: AOGPT | MaskedEncoder, key: jax.Array, orders: jax.Array, *, steps: int = 0,
             schedule: str = 'linear', rule: SamplingRule = DEFAULT_RULE,
             tokens: jax.Array | None = None, prompt_length: int = 0) -> jax.Array:
  """Generates tokens in the given orders, several a step, in one jitted loop.

  Tokens of one step are drawn independently given those of earlier steps; with one token a step the
  law is exactly the model's, Π p(x_σ(t) | x_σ(<t), σ(t)) under `rule`. Row b depends on (key, b)
  alone, not on the other rows.

  Args:
    model: an AOGPT; or a MaskedEncoder, which runs the whole sequence at every step.
    key: typed PRNG key.
    orders: (B, n) int32, row b a permutation of 0..n-1, n <= context_length.
    steps: forward passes, 1..n - prompt_length; 0: one token a step.
    schedule: 'linear' or 'cosine', see `reveal_counts`.
    rule: temperature, top-p and the ids that may be drawn.
    tokens: (B, n) int32 in sequence order; those at orders[:, :prompt_length] are given.
    prompt_length: how many tokens are given; they are never changed.

  Returns:
    tokens (B, n) int32 in sequence order.

  Raises:
    UserError: for orders that are no permutations or too long, or impossible options.
  """
  orders = jnp.asarray(orders, jnp.int32)
  _check_orders(model, np.asarray(orders), prompt_length)
  check(tokens is not None or prompt_length == 0, 'prompt_length', prompt_length,
        'needs `tokens`, which were not given')
  tokens = jnp.zeros_like(orders) if tokens is None else jnp.asarray(tokens, jnp.int32)
  remaining = orders.shape[1] - prompt_length
  if remaining == 0:
    return tokens
  counts = np.concatenate([[0], reveal_counts(schedule, remaining, steps or remaining)])
  if isinstance(model, MaskedEncoder):
    turns = masked.turns_of_orders(np.asarray(orders), prompt_length + counts, prompt_length)
    return masked.fill(model, key, tokens, turns, rule)[0]
  group = int(np.diff(counts).max())
  graphdef, params = nnx.split(model)
  generated = _generate(graphdef, params, key, _in_generation_order(tokens, orders, group), orders,
                        jnp.asarray(prompt_length + counts, jnp.int32), rule=rule.validate(),
                        prompt_length=prompt_length, group=group)[:, :orders.shape[1]]
  rows = jnp.arange(orders.shape[0])[:, None]
  return tokens.at[rows, orders].set(generated)


def decode_logits(model: AOGPT, tokens: jax.Array, orders: jax.Array, groups: list[int],
                  prompt_length: int = 0) -> jax.Array:
  """Logits of given tokens, computed by the steps of parallel generation (teacher forced).

  Args:
    model: an AOGPT.
    tokens: (B, n) int32 in sequence order.
    orders: (B, n) int32, row b a permutation.
    groups: tokens revealed by each step; they sum to n - prompt_length.
    prompt_length: tokens given before the first step.

  Returns:
    (B, n - prompt_length, V) float32 in generation order; the logits of a token are conditioned on
    the tokens of earlier steps.

  Raises:
    UserError: for groups that do not fit, or bad orders.
  """
  orders, tokens = jnp.asarray(orders, jnp.int32), jnp.asarray(tokens, jnp.int32)
  _check_orders(model, np.asarray(orders), prompt_length)
  groups, length = np.asarray(groups, np.int64), orders.shape[1]
  if groups.min(initial=1) < 1 or groups.sum() != length - prompt_length:
    raise UserError(f'groups={groups.tolist()}: must be positive and sum to '
                    f'{length - prompt_length}, the tokens after the prompt')
  counts = prompt_length + np.concatenate([[0], np.cumsum(groups)])
  graphdef, params = nnx.split(model)
  group = int(groups.max())
  logits = _decode_logits(graphdef, params, _in_generation_order(tokens, orders, group), orders,
                          jnp.asarray(counts, jnp.int32), prompt_length=prompt_length, group=group)
  return logits[:, prompt_length:length]
