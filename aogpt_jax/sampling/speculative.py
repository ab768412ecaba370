"""Lossless speculative generation in any order: fewer forward calls, the law of one token a step.

In generation order, with s[i] the position generated i-th and x[i] its token, item i is
(x[i-1], s[i-1], s[i]); its logits are the law of x[i] given all before. Of m known tokens, item m
is known too but not computed, and the cache holds the items 0 .. m-1. A call computes

  * the chain: items m, m+1, … with drafts in place of the tokens that are not known yet. It says
    what the law of every draft would have been (verification), and it is cached;
  * copies of item m with the targets s[m+1], s[m+2], …: laws to draw the next drafts from. Told the
    wrong target, they are seen by none but themselves and never cached.

A draft y from p is kept with probability min(1, q(y) / p(y)), q its law by the chain. The first one
refused is replaced by a draw from max(q - p, 0), which makes the token's law exactly q; and if all
are kept, one more token is drawn from the last q. The cache behind a refused draft is garbage: it
is hidden by the row's number of known tokens, and overwritten.

Scheme T drafts and verifies in two calls. Scheme FS does both in one, so its drafts come from the
context before the tokens that this call settles: more of them are refused, but a call is saved.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from aogpt_jax import keys
from aogpt_jax.config import check, check_choice
from aogpt_jax.model import AOGPT, Items, make_items
from aogpt_jax.model.attention import Past
from aogpt_jax.model.decoder import NONE_POSITION, Unstacked
from aogpt_jax.sampling import cache as cache_lib, parallel
from aogpt_jax.sampling.cache import Layers
from aogpt_jax.sampling.logits import DEFAULT_RULE, SamplingRule, sample_categorical, transform

SCHEMES = ('T', 'FS')


class Speculation(NamedTuple):
  """What `speculative` returns.

  tokens: (B, n) int32 in sequence order.
  calls: (B,) int32, forward calls until the row was complete, at most one a token generated; the
    one that reads the prompts of a batch is not counted.
  drafted: (B,) int32, drafts that were put to the test (T: without the first of a round, whose law
    is exact).
  accepted: (B,) int32, how many of them were kept.
  """

  tokens: jax.Array
  calls: jax.Array
  drafted: jax.Array
  accepted: jax.Array


class _State(NamedTuple):
  """Carry of the loop.

  generated: (B, n) int32 in generation order: known tokens, then drafts, then garbage.
  known: (B,) int32, tokens that are final, at most `end`.
  cache: of all layers, see `sampling.cache`; valid below `known`.
  draft_law: FS: (B, w, V) float32, the laws that the pending drafts were drawn from; T: None.
  calls, drafted, accepted: see `Speculation`.
  """

  generated: jax.Array
  known: jax.Array
  cache: Layers
  draft_law: jax.Array | None
  calls: jax.Array
  drafted: jax.Array
  accepted: jax.Array


class _Noise(NamedTuple):
  """Keys of every row, (B,) each, folded with the order index of a token where it is used.

  A token is settled once, so the same noise may serve all its drafts: no earlier one was looked at.
  """

  draft: jax.Array
  test: jax.Array
  final: jax.Array


class _Context(NamedTuple):
  """What the loop reads and never changes; `end` is (B,) int32, order index to stop at."""

  model: AOGPT
  layers: Unstacked
  orders: jax.Array
  end: jax.Array
  noise: _Noise
  rule: SamplingRule


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
  """Entries of every row, (B, n) and (B, k) -> (B, k); anything for an index that is too large."""
  return jnp.take_along_axis(array, jnp.clip(index, 0, array.shape[1] - 1), axis=1)


def _put(array: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
  """Writes (B, k, …) values to the slots (B, k) of (B, n, …); those for slots >= n are dropped."""
  rows = jnp.arange(array.shape[0])[:, None]
  return array.at[rows, index].set(values.astype(array.dtype), mode='drop')


def _kept(new: jax.Array, chain: int) -> jax.Array:
  """The keys or values that are cached, of (B, T, H, K): the chain's, not those of the copies."""
  return new[:, :chain]


def _residual(q: jax.Array, p: jax.Array) -> jax.Array:
  """Where a refused draft's replacement comes from, (B, V), not normalised."""
  rest = jnp.maximum(q - p, 0)
  # All zero if q = p up to rounding: then q itself.
  return jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, q)


def _draw(row_keys: jax.Array, index: jax.Array, logits: jax.Array) -> jax.Array:
  """Draws (B, k) tokens for the order indices (B, k) from logits (B, k, V)."""
  return jax.vmap(jax.vmap(sample_categorical))(jax.vmap(keys.row_keys)(row_keys, index), logits)


def _call(c: _Context, state: _State, start: jax.Array, chain: int, copies: int,
          ) -> tuple[jax.Array, _State]:
  """One forward call: items start .. start + chain - 1, then `copies` of item `start`.

  Returns hidden (B, chain + copies, d), and the state with the chain cached. Copy k, at chain + k,
  has the target of the token start + 1 + k.
  """
  ahead = jnp.arange(chain + copies)
  item = start[:, None] + jnp.where(ahead < chain, ahead, 0)
  target = start[:, None] + jnp.where(ahead < chain, ahead, ahead - chain + 1)
  position = jnp.where(item == 0, NONE_POSITION, _at(c.orders, item - 1))
  items = Items(_at(state.generated, item - 1), position, _at(c.orders, target))
  causal = ahead[None, :] <= ahead[:, None]
  of_chain = (ahead[:, None] < chain) & (ahead[None, :] < chain)
  new_visible = (causal & of_chain) | jnp.eye(chain + copies, dtype=bool)
  slots = jnp.arange(state.cache[0][0].shape[-1])
  cached_visible = jnp.broadcast_to(slots < start[:, None, None], (*item.shape, len(slots)))
  past = [Past(*layer, cached_visible, new_visible) for layer in state.cache]
  hidden, new = c.model.extend(items, c.layers, past)
  chain_slots = cache_lib.after(start[:, None] + jnp.arange(chain), hidden)
  rows = jnp.arange(item.shape[0])[:, None]
  put = lambda old, x: old.at[rows, :, :, chain_slots].set(_kept(x, chain), mode='drop')
  return hidden, state._replace(cache=jax.tree.map(put, state.cache, new))


def _law(c: _Context, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Logits of (B, k, d) under the rule, and their probabilities: (B, k, V) float32 each."""
  logits = transform(c.model.logits(hidden), c.rule)
  return logits, jax.nn.softmax(logits, axis=-1)


def _make_drafts(c: _Context, state: _State, hidden: jax.Array) -> tuple[jax.Array, _State]:
  """Draws a draft for each of (B, w, d) after the known tokens; returns their laws (B, w, V)."""
  index = state.known[:, None] + jnp.arange(hidden.shape[1])
  logits, law = _law(c, hidden)
  drafts = _draw(c.noise.draft, index, logits)
  return law, state._replace(generated=_put(state.generated, index, drafts))


def _settle(c: _Context, state: _State, p: jax.Array, q: jax.Array, certain: int,
            pending: jax.Array | bool = True) -> tuple[jax.Array, _State]:
  """Tests the drafts, replaces the first one refused, and takes one more if none is.

  Rows that are complete come out as they went in: what they write lies at `end` or behind.

  Args:
    c: the context.
    state: with w drafts from `known` on.
    p: (B, w, V) the laws they were drawn from.
    q: (B, w + 1, V) their laws by the chain, and that of the token behind them.
    certain: the first so many drafts come from q itself.
    pending: (B, 1) bool, whether the row has drafts; where not, p must be 0.

  Returns:
    accepted (B,) int32, and the state after accepted + 1 more tokens, or at its end.
  """
  window = p.shape[1]
  ahead = jnp.arange(window)
  index = state.known[:, None] + ahead
  drafts = _at(state.generated, index)[..., None]
  of_draft = lambda law: jnp.take_along_axis(law, drafts, axis=-1)[..., 0]
  noise = jax.vmap(jax.vmap(jax.random.uniform))(jax.vmap(keys.row_keys)(c.noise.test, index))
  # Strict, and no quotient: a draft that q excludes is refused even by a noise of 0.
  passed = (noise * of_draft(p) < of_draft(q[:, :window])) | (ahead < certain)
  valid = pending & (index < c.end[:, None])
  accepted = jnp.cumprod(passed & valid, axis=1, dtype=jnp.int32).sum(axis=1)

  rows = jnp.arange(p.shape[0])
  p = jnp.pad(p, ((0, 0), (0, 1), (0, 0)))  # nothing was drafted behind the last: plain q
  final = _residual(q[rows, accepted], p[rows, accepted])
  at = (state.known + accepted)[:, None]
  token = _draw(c.noise.final, at, jnp.log(final)[:, None])
  tested = lambda count: jnp.maximum(count - certain, 0)
  return accepted, state._replace(
      generated=_put(state.generated, at, token),
      known=jnp.minimum(state.known + accepted + 1, c.end),
      drafted=state.drafted + tested(valid.sum(axis=1)),
      accepted=state.accepted + tested(accepted))


def _two_calls(c: _Context, window: int, state: _State) -> _State:
  """Scheme T: drafts given all known tokens, then their verification."""
  # A row that lacks one token is complete after the first call: its only draft is certain.
  calls = state.calls + jnp.minimum(c.end - state.known, 2)
  hidden, state = _call(c, state, state.known, chain=1, copies=window - 1)
  p, state = _make_drafts(c, state, hidden)
  hidden, state = _call(c, state, state.known + 1, chain=window, copies=0)
  # p[:, 0] is the law of item `known` itself: computed again, it could round differently.
  q = jnp.concatenate([p[:, :1], _law(c, hidden)[1]], axis=1)
  return _settle(c, state, p, q, certain=1)[1]._replace(calls=calls)


def _one_call(c: _Context, window: int, state: _State) -> _State:
  """Scheme FS: verifies the last call's drafts, and computes laws for the next ones.

  How many drafts are kept is not known before the call: it has copies for whatever comes next.
  """
  calls = state.calls + (state.known < c.end)
  hidden, state = _call(c, state, state.known, chain=window + 1, copies=2 * window)
  accepted, state = _settle(c, state, state.draft_law, _law(c, hidden[:, :window + 1])[1],
                            certain=0, pending=state.calls[:, None] > 0)
  copy = window + 1 + accepted[:, None] + jnp.arange(window)
  law, state = _make_drafts(c, state, jnp.take_along_axis(hidden, copy[..., None], axis=1))
  return state._replace(draft_law=law, calls=calls)


def _first_cache(c: _Context, generated: jax.Array, prefill: int, slots: int) -> Layers:
  """A cache of `slots` slots with the items 0 .. prefill-1, computed in one causal pass."""
  cache = cache_lib.empty(c.model.config, generated.shape[0], slots)
  if not prefill:
    return cache.layers
  items = make_items(generated[:, :prefill], c.orders[:, :prefill])
  _, new = c.model.extend(items, c.layers, [None] * c.model.config.num_layers)
  valid = jnp.ones(items.token.shape, bool)
  return cache_lib.write(cache, new, 0, prefill, jnp.int32(0), valid).layers


@functools.partial(jax.jit, static_argnames=('graphdef', 'rule', 'window', 'scheme', 'prefill'))
def _speculate(graphdef, params, key, rows, generated, orders, known, end, *, rule, window,
               scheme, prefill):
  """Completes `generated` (B, n), in generation order, up to `end`: returns the last state."""
  model = nnx.merge(graphdef, params)
  batch, length = orders.shape
  row_keys = lambda stream: keys.row_keys(stream, rows)
  noise = _Noise(*map(row_keys, jax.random.split(key, len(_Noise._fields))))
  c = _Context(model, model.unstack(), orders, end, noise, rule)
  # Tokens that are not given are never read: not even one that the prefill pads with.
  generated = jnp.where(jnp.arange(length) < known[:, None], generated, 0)
  zero = jnp.zeros(batch, jnp.int32)
  law = None
  if scheme == 'FS':
    law = jnp.zeros((batch, window, model.config.vocab_size), jnp.float32)
  segments = cache_lib.cut(prefill, length)
  cache = _first_cache(c, generated, prefill, segments[0])
  state = _State(generated, known, cache, law, zero, zero, zero)
  body: Callable[[_State], _State] = functools.partial(
      _one_call if scheme == 'FS' else _two_calls, c, window)
  for slots in segments:
    state = state._replace(cache=cache_lib.grow(state.cache, slots))
    # What a round writes fits the segment; what it writes behind the last token is dropped.
    fits = lambda state, slots=slots: (
        (slots == length) | (state.known.max() + window + 1 <= slots))
    state = jax.lax.while_loop(
        lambda state, fits=fits: (state.known < end).any() & fits(state), body, state)
  return state


def speculative(model: AOGPT, key: jax.Array, orders: jax.Array, *, window: int = 4,
                scheme: str = 'FS', rule: SamplingRule = DEFAULT_RULE,
                tokens: jax.Array | None = None, prompt_length: int | jax.Array = 0,
                end: int | jax.Array | None = None, rows: jax.Array | None = None) -> Speculation:
  """Generates tokens in the given orders, in at most as many forward calls as tokens.

  The law is that of one token a step, Π p(x_σ(t) | x_σ(<t), σ(t)) with every factor under `rule`,
  whatever the scheme and the window: they decide how many calls it takes. A row depends on (key,
  its number) alone, not on the other rows.

  Args:
    model: an AOGPT.
    key: typed PRNG key.
    orders: (B, n) int32, row b a permutation of 0..n-1, n <= context_length.
    window: w, drafts at a time; at least 1.
    scheme: 'T': drafts from all known tokens, two calls of w items; or 'FS': drafts from those
      before the last call, one call of 3w + 1 items.
    rule: temperature, top-p and the ids that may be drawn.
    tokens: (B, n) int32 in sequence order; the first prompt_length of each order are given.
    prompt_length: how many tokens are given, one number or one a row, (B,).
    end: order index to stop at, one number or one a row, (B,); None: n. Tokens from there on
      are neither read nor changed.
    rows: (B,) the rows' numbers, which their noise depends on; None: 0..B-1.

  Returns:
    A `Speculation`: tokens and, for every row, calls, drafts tested and drafts kept.

  Raises:
    UserError: for an encoder, orders that are no permutations or too long, or impossible options.
  """
  check(isinstance(model, AOGPT), 'model', type(model).__name__,
        'speculative generation needs a decoder: an encoder cannot verify drafts')
  check(window >= 1, 'window', window, 'must be at least 1')
  check_choice('scheme', scheme, SCHEMES)
  check(not rule.annealed, 'final_temperature', rule.final_temperature,
        'must be -1: speculative generation has one law for every token')
  orders, tokens, start, end = parallel.prepare(model, orders, tokens, prompt_length, end)
  batch, length = orders.shape
  # A power of two, so that few lengths are compiled.
  longest = int(start.max())
  prefill = min(1 << (longest - 1).bit_length(), length) if longest else 0
  graphdef, params = nnx.split(model)
  given = jnp.take_along_axis(tokens, orders, axis=1)
  rows = jnp.arange(batch) if rows is None else jnp.asarray(rows)
  state = _speculate(graphdef, params, key, rows, given, orders, jnp.asarray(start),
                     jnp.asarray(end), rule=rule.validate(), window=min(window, length),
                     scheme=scheme, prefill=prefill)
  index = jnp.arange(length)
  is_new = (index >= start[:, None]) & (index < end[:, None])
  filled = jnp.where(is_new, state.generated, given)
  tokens = tokens.at[jnp.arange(batch)[:, None], orders].set(filled)
  return Speculation(tokens, state.calls, state.drafted, state.accepted)
