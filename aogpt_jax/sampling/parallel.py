"""Parallel generation in any order with a key/value cache (paper section 4).

In generation order, with s[i] the position generated i-th and x[i] its token, item i is
(x[i-1], s[i-1], s[i]). The keys and values of an item depend on its target, so item i can be cached
once s[i] is certain to be its successor. A step that reveals k tokens after m known ones runs:

  * the items m' .. m-1 whose tokens the last step revealed (caught up and cached), and
  * k copies of item m with the targets s[m] .. s[m+k-1]. A copy sees the context and itself, no
    other copy; copy 0 is the true item m and is cached.

So n tokens in `steps` steps take 2n - steps items in all. Rows of a batch may have other prompts
and other numbers of tokens to fill: each has its own m and k, all share the cache slots.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import keys
from aogpt_jax.config import check, check_choice
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT, Items, MaskedEncoder, make_items
from aogpt_jax.model.attention import Past
from aogpt_jax.model.decoder import NONE_POSITION, Unstacked
from aogpt_jax.sampling import cache as cache_lib, masked
from aogpt_jax.sampling.cache import Cache
from aogpt_jax.sampling.logits import (
  DEFAULT_RULE,
  SamplingRule,
  sample_categorical,
  token_details,
  transform,
)
from aogpt_jax.sampling.schedules import GIVEN, reveal_counts, reveal_turns

PREFILLS = ('causal', 'reversed')


class Plan(NamedTuple):
  """Who reveals what when; known before the loop starts.

  known: (steps + 1, B) int32 tokens of each row known before each step, and at the end.
  slot: (steps,) int32, the first cache slot that a step writes.
  width: (steps,) int32, how many slots it keeps: caught-up items of the busiest row, and copy 0.
  steps: (B,) int32, how many steps a row takes; it may be done before the others.
  turns: (segments + 1,) int32, the steps at which the cache grows, and the end.
  """

  known: jax.Array
  slot: jax.Array
  width: jax.Array
  steps: jax.Array
  turns: jax.Array


class Layout(NamedTuple):
  """What is compiled in: longest prompt, largest group, cache slots, and the prompt's mask.

  slots: of each segment of the cache, see `sampling.cache`.
  """

  prompt: int
  group: int
  slots: tuple[int, ...]
  prefill: str


def _make_plan(known: np.ndarray, prefill: str) -> tuple[Plan, Layout]:
  """Plan and sizes from (B, steps + 1) tokens known before each step and at the end."""
  groups = np.diff(known, axis=1)
  prompt, group = int(known[:, 0].max()), int(groups.max())
  caught_up = np.maximum(np.pad(groups[:, :-1], ((0, 0), (1, 0))) - 1, 0).max(axis=0)
  width = caught_up + 1
  slot = prompt + np.cumsum(width) - width
  steps = (groups > 0).sum(axis=1)
  # A step writes `group` slots and the next one starts after `width` of them.
  slots = cache_lib.cut(prompt, prompt + int(width.sum()) + group - 1)
  plan = Plan(*(jnp.asarray(x, jnp.int32) for x in (known.T, slot, width, steps)),
              cache_lib.turns(slots, slot + group))
  return plan, Layout(prompt, group, slots, prefill)


def start(model: AOGPT, generated: jax.Array, orders: jax.Array, known: jax.Array, layout: Layout,
          ) -> tuple[Unstacked, Cache]:
  """An empty cache, or one with the items of the prompts, computed in one causal pass."""
  c, layers, batch = model.config, model.unstack(), orders.shape[0]
  cache = cache_lib.empty(c, batch, layout.slots[0])
  if not layout.prompt:
    return layers, cache
  items = make_items(generated[:, :layout.prompt], orders[:, :layout.prompt])
  valid = jnp.arange(layout.prompt) < known[:, None]
  past = [None] * c.num_layers  # causal: what pads a shorter prompt comes last and is not seen
  if layout.prefill == 'reversed':
    later = jnp.triu(jnp.ones((layout.prompt, layout.prompt), bool)) & valid[:, None]
    past = [Past(*nothing, jnp.zeros((layout.prompt, 0), bool),
                 later | jnp.eye(layout.prompt, dtype=bool))
            for nothing in cache_lib.empty_layers(c, batch, 0)]
  _, new = model.extend(items, layers, past)
  return layers, cache_lib.write(cache, new, 0, layout.prompt, jnp.int32(0), valid)


def _step_items(generated: jax.Array, orders: jax.Array, before: jax.Array, known: jax.Array,
                group: int) -> Items:
  """Per row `group` - 1 items from `before` on, to be caught up, and `group` copies of `known`."""
  last = orders.shape[1] - 1
  ahead = before[:, None] + jnp.arange(group - 1)
  index = jnp.concatenate([ahead, jnp.repeat(known[:, None], group, axis=1)], axis=1)
  targets = jnp.concatenate([ahead, known[:, None] + jnp.arange(group)], axis=1)
  take = lambda x, i: jnp.take_along_axis(x, jnp.clip(i, 0, last), axis=1)
  position = jnp.where(index == 0, NONE_POSITION, take(orders, index - 1))
  return Items(take(generated, index - 1), position, take(orders, targets))


def _step(model: AOGPT, layers: Unstacked, cache: Cache, items: Items, caught_up: jax.Array,
          group: int, slot: jax.Array, width: jax.Array) -> tuple[jax.Array, Cache]:
  """Logits (B, group, V) of the copies, and the cache with the caught-up items and copy 0."""
  num_new, ahead = items.token.shape[1], group - 1
  real = jnp.arange(num_new) < caught_up[:, None]  # the rest of the first `ahead` is padding
  causal = jnp.tril(jnp.ones((num_new, num_new), bool))
  new_visible = (causal & real[:, None, :]) | jnp.eye(num_new, dtype=bool)
  cached_visible = jnp.broadcast_to(cache.valid[:, None], (*real.shape, cache.valid.shape[1]))
  past = [Past(*layer, cached_visible, new_visible) for layer in cache.layers]
  hidden, new = model.extend(items, layers, past)
  slot = cache_lib.after(slot, hidden)
  if ahead:
    cache = cache_lib.write(cache, new, 0, ahead, slot, real[:, :ahead])
  cache = cache_lib.write(cache, new, ahead, group, slot + width - 1, jnp.ones_like(real[:, :1]))
  return model.logits(hidden[:, ahead:]), cache


def decode(model: AOGPT, generated: jax.Array, orders: jax.Array, plan: Plan, layout: Layout,
           state: Any, reveal: Callable[..., tuple[Any, jax.Array]]) -> tuple[Any, jax.Array]:
  """Runs every step; reveal(step, state, generated, logits, index, shown) -> state and generated.

  index (B, group) are the entries of the order that a step's logits are for, `shown` tells which
  of them the row reveals in this step.
  """
  layers, cache = start(model, generated, orders, plan.known[0], layout)

  def body(i, carry):
    state, generated, cache = carry
    known = plan.known[i]
    cached = jnp.where(i == 0, known, plan.known[i - 1] + 1)
    items = _step_items(generated, orders, cached, known, layout.group)
    logits, cache = _step(model, layers, cache, items, known - cached, layout.group, plan.slot[i],
                          plan.width[i])
    index = known[:, None] + jnp.arange(layout.group)
    shown = index < plan.known[i + 1][:, None]
    state, generated = reveal(i, state, generated, logits, index, shown)
    return state, generated, cache

  carry = state, generated, cache
  for i, slots in enumerate(layout.slots):
    carry = (*carry[:2], cache_lib.grow(carry[2], slots))
    carry = jax.lax.fori_loop(plan.turns[i], plan.turns[i + 1], body, carry)
  return carry[:2]


class Generation(NamedTuple):
  """Texts and how they came about; all (B, n), by position.

  tokens: int32. step: int32, in which step a token was revealed, GIVEN if it was not.
  log_prob: float32 nats of the token under the model, given what was known (before temperature and
  top-p), nan if given. rank: int32, how many ids were more probable, GIVEN if given.
  """

  tokens: jax.Array
  step: np.ndarray
  log_prob: jax.Array
  rank: jax.Array


@functools.partial(jax.jit, static_argnames=('graphdef', 'rule', 'layout', 'details'))
def _generate(graphdef, params, row_keys, generated, orders, plan, *, rule, layout, details):
  """Fills `generated` (B, n + group, generation order); log-probs and ranks likewise, or ()."""
  model = nnx.merge(graphdef, params)
  rows = jnp.arange(orders.shape[0])
  draw_row = lambda row_key, index, law: jax.vmap(sample_categorical)(
      keys.row_keys(row_key, index), law)

  def reveal(step, state, generated, logits, index, shown):
    law = transform(logits, rule, rule.temperature_at(step, plan.steps))
    drawn = jax.vmap(draw_row)(row_keys, index, law)
    put = lambda old, new: old.at[rows[:, None], index].set(
        jnp.where(shown, new, jnp.take_along_axis(old, index, axis=1)))
    if details:
      state = tuple(map(put, state, token_details(logits, drawn)))
    return state, put(generated, drawn)

  state = (jnp.full(generated.shape, jnp.nan), jnp.full(generated.shape, GIVEN)) if details else ()
  state, generated = decode(model, generated, orders, plan, layout, state, reveal)
  return generated, state


@functools.partial(jax.jit, static_argnames=('graphdef', 'layout'))
def _decode_logits(graphdef, params, generated, orders, plan, *, layout):
  """Logits (B, n + group, V) of given tokens, step by step through the cache."""
  model = nnx.merge(graphdef, params)
  rows = jnp.arange(orders.shape[0])[:, None]

  def reveal(step, all_logits, generated, logits, index, shown):
    return all_logits.at[rows, index].set(logits), generated  # a later step overwrites the excess

  all_logits = jnp.zeros((*generated.shape, model.config.vocab_size), jnp.float32)
  return decode(model, generated, orders, plan, layout, all_logits, reveal)[0]


def _per_row(name: str, value: int | np.ndarray, batch: int, length: int) -> np.ndarray:
  value = np.asarray(value)
  check(value.dtype.kind in 'iu' and value.shape in ((), (batch,)), name, value.tolist(),
        f'must be one integer or one for each of the {batch} rows')
  value = np.broadcast_to(value, (batch,)).astype(np.int32)
  check(((value >= 0) & (value <= length)).all(), name, value.tolist(), f'must be in 0..{length}')
  return value


def _in_generation_order(tokens: jax.Array, orders: jax.Array, group: int) -> jax.Array:
  """(B, n) in sequence order -> (B, n + group): the tail takes what a last short step draws."""
  return jnp.pad(jnp.take_along_axis(tokens, orders, axis=1), ((0, 0), (0, group)))


def prepare(model: AOGPT | MaskedEncoder, orders: jax.Array, tokens: jax.Array | None,
            prompt_length: int | np.ndarray, end: np.ndarray | None,
            ) -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
  """Checks what samplers are given, and fills in what they are not.

  Returns:
    orders and tokens (B, n) int32 on the device, prompt lengths and ends (B,) int32 on the host.

  Raises:
    UserError: unless every order is a permutation within the context, and the rest fits it.
  """
  orders = jnp.asarray(orders, jnp.int32)
  batch, length = orders.shape
  if length > model.config.context_length:
    raise UserError(f'orders of length {length}: the context_length of this model is '
                    f'{model.config.context_length}')
  if not (np.sort(orders, axis=1) == np.arange(length)).all():
    raise UserError(f'orders: every row must be a permutation of 0..{length - 1}')
  first = _per_row('prompt_length', prompt_length, batch, length)
  end = _per_row('end', length if end is None else end, batch, length)
  check((first <= end).all(), 'end', end.tolist(),
        f'must be at least prompt_length={first.tolist()}')
  if tokens is None:
    check(not first.any(), 'prompt_length', first.tolist(), 'needs `tokens`, which were not given')
    return orders, jnp.zeros_like(orders), first, end
  tokens = jnp.asarray(tokens, jnp.int32)
  check(tokens.shape == orders.shape, 'tokens', tokens.shape,
        f'must have the shape {orders.shape} of the orders')
  return orders, tokens, first, end


def nothing_generated(tokens: jax.Array) -> Generation:
  """The record of tokens that were all given."""
  given = jnp.full(tokens.shape, GIVEN)
  return Generation(tokens, given, jnp.full(tokens.shape, jnp.nan), given)


def known_counts(schedule: str, first: np.ndarray, end: np.ndarray, steps: int) -> np.ndarray:
  """Tokens of each row known before each step and at the end, (B, steps + 1) int64.

  A row with fewer tokens to fill than `steps` takes one a step, and is done before the others.

  Args:
    schedule: see `reveal_counts`.
    first, end: (B,) tokens known at first and at the end.
    steps: 1..the most that a row has to fill; 0: that many.
  """
  wanted = end - first
  most = int(wanted.max())
  steps = steps or most
  check(1 <= steps <= most, 'steps', steps,
        f'must be in 1..{most}, the number of tokens to generate')
  counts = {w: reveal_counts(schedule, w, min(w, steps)) for w in set(wanted.tolist()) if w}
  known = np.tile(end[:, None], steps + 1)
  for b, w in enumerate(wanted.tolist()):
    revealed = [0, *(counts[w] if w else [])]
    known[b, :len(revealed)] = first[b] + np.asarray(revealed)
  return known


def count_items(known: np.ndarray) -> tuple[int, int]:
  """Items of a generation, real ones and all that are computed, padding included.

  A row that fills R tokens after a prompt of c in s steps has at most c + 2R - s real items: every
  token is a copy once, and is caught up unless it was copy 0 or came in the last step.

  Args:
    known: from `known_counts`.
  """
  groups = np.diff(known, axis=1)
  caught_up = np.maximum(groups - 1, 0).sum() - sum(max(row[row > 0][-1:].sum() - 1, 0)
                                                    for row in groups)
  real = known[:, 0].sum() + groups.sum() + caught_up
  prompt, group = int(known[:, 0].max()), int(groups.max())
  return int(real), len(known) * (prompt + groups.shape[1] * (2 * group - 1))


def generate_record(model: AOGPT | MaskedEncoder, key: jax.Array, orders: jax.Array, *,
                    steps: int = 0, schedule: str = 'linear', rule: SamplingRule = DEFAULT_RULE,
                    tokens: jax.Array | None = None, prompt_length: int | np.ndarray = 0,
                    end: np.ndarray | None = None, rows: np.ndarray | None = None,
                    prefill: str = 'causal', details: bool = True) -> Generation:
  """Generates tokens in the given orders, several a step, in one jitted loop.

  Tokens of one step are drawn independently given those of earlier steps; with one token a step the
  law is exactly the model's, Π p(x_σ(t) | x_σ(<t), σ(t)) under `rule`. A row depends
  on (key, its number) alone, not on the other rows, whose prompts and lengths may differ.

  Args:
    model: an AOGPT; or a MaskedEncoder, which runs the whole sequence at every step.
    key: typed PRNG key.
    orders: (B, n) int32, row b a permutation of 0..n-1, n <= context_length.
    steps: forward passes, 1..the most tokens that a row has to fill; 0: one token a step.
    schedule: 'linear' or 'cosine', see `reveal_counts`.
    rule: temperature, top-p and the ids that may be drawn.
    tokens: (B, n) int32 in sequence order; those at orders[b, :prompt_length[b]] are given.
    prompt_length: () or (B,), how many tokens of each row are given; they are never changed.
    end: (B,), entries of the order from here on are neither filled nor seen; None: n.
    rows: (B,) the rows' numbers, which their noise depends on; None: 0..B-1.
    prefill: 'causal', as in training; 'reversed' lets prompt items see the later ones instead of
      the earlier, which is what the authors' conditional generation computes.
    details: whether log-probabilities and ranks are wanted; False leaves them nan and GIVEN.

  Raises:
    UserError: for orders that are no permutations or too long, or impossible options.
  """
  check_choice('prefill', prefill, PREFILLS)
  orders, tokens, first, end = prepare(model, orders, tokens, prompt_length, end)
  batch, length = orders.shape
  nothing = nothing_generated(tokens)
  if (first == end).all():
    return nothing
  known = known_counts(schedule, first, end, steps)
  turns = reveal_turns(np.asarray(orders), known)
  row_keys = keys.row_keys(key, jnp.arange(batch) if rows is None else jnp.asarray(rows))
  if isinstance(model, MaskedEncoder):
    check((end == length).all(), 'end', end.tolist(),
          f'must be {length} for an encoder, which sees every position')
    filled, log_prob, rank, _ = masked.fill(model, row_keys, tokens, turns, rule)
    return Generation(filled, turns, log_prob, rank)
  plan, layout = _make_plan(known, prefill)
  graphdef, params = nnx.split(model)
  generated, found = _generate(
      graphdef, params, row_keys, _in_generation_order(tokens, orders, layout.group), orders, plan,
      rule=rule.validate(), layout=layout, details=details)
  by_position = lambda old, new: old.at[jnp.arange(batch)[:, None], orders].set(new[:, :length])
  log_prob, rank = map(by_position, nothing[2:], found) if details else nothing[2:]
  return Generation(by_position(tokens, generated), turns, log_prob, rank)


def generate(model: AOGPT | MaskedEncoder, key: jax.Array, orders: jax.Array, **options: Any,
             ) -> jax.Array:
  """`generate_record` without the record: tokens (B, n) int32 in sequence order."""
  return generate_record(model, key, orders, details=False, **options).tokens


def decode_logits(model: AOGPT, tokens: jax.Array, orders: jax.Array, groups: list[int],
                  prompt_length: int = 0, prefill: str = 'causal') -> jax.Array:
  """Logits of given tokens, computed by the steps of parallel generation (teacher forced).

  Args:
    model: an AOGPT.
    tokens: (B, n) int32 in sequence order.
    orders: (B, n) int32, row b a permutation.
    groups: tokens revealed by each step; they sum to n - prompt_length.
    prompt_length: tokens given before the first step.
    prefill: see `generate_record`.

  Returns:
    (B, n - prompt_length, V) float32 in generation order; the logits of a token are conditioned on
    the tokens of earlier steps.

  Raises:
    UserError: for groups that do not fit, or bad orders.
  """
  check_choice('prefill', prefill, PREFILLS)
  orders, tokens, _, _ = prepare(model, orders, tokens, prompt_length, None)
  batch, length = orders.shape
  groups = np.asarray(groups, np.int64)
  if groups.min(initial=1) < 1 or groups.sum() != length - prompt_length:
    raise UserError(f'groups={groups.tolist()}: must be positive and sum to '
                    f'{length - prompt_length}, the tokens after the prompt')
  known = np.tile(prompt_length + np.concatenate([[0], np.cumsum(groups)]), (batch, 1))
  plan, layout = _make_plan(known, prefill)
  graphdef, params = nnx.split(model)
  logits = _decode_logits(graphdef, params, _in_generation_order(tokens, orders, layout.group),
                          orders, plan, layout=layout)
  return logits[:, prompt_length:length]
