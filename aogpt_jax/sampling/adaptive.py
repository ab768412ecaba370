"""Generation in an order that the model chooses as it goes, from what is committed alone.

At each step the last item is copied once for every candidate position; the position whose law is
surest comes next, its token is drawn from that law, and its copy, the true item now, is cached.
n tokens cost n(n+1)/2 copies with all positions as candidates, n·C with C random ones.

The law is Π p(x_s | what came before, s) along a path that depends on the text: a proper
distribution, but not that of any fixed order. A score must not look at drawn tokens: that would
act as a lower temperature.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import keys
from aogpt_jax.config import POLICIES, check, check_choice
from aogpt_jax.model import AOGPT, Items
from aogpt_jax.model.attention import Past
from aogpt_jax.model.decoder import NONE_POSITION
from aogpt_jax.sampling import cache as cache_lib, parallel
from aogpt_jax.sampling.logits import SamplingRule, sample_categorical, token_details, transform
from aogpt_jax.sampling.schedules import GIVEN


def certainty(logits: jax.Array, policy: str) -> jax.Array:
  """How sure a law is: (..., V) -> (...) float32, larger is surer.

  confidence: the largest probability. entropy: minus the entropy, nats. margin: the largest
  probability minus the second.
  """
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  if policy == 'confidence':
    return log_probs.max(axis=-1)
  if policy == 'entropy':
    probs = jnp.exp(log_probs)
    return jnp.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1)
  first, second = jnp.moveaxis(jnp.exp(jax.lax.top_k(log_probs, 2)[0]), -1, 0)
  return first - second


def _candidates(row_keys: jax.Array, step: jax.Array, is_open: jax.Array, count: int) -> jax.Array:
  """`count` positions of each row, open ones first: all of them, or some at random; (B, count)."""
  length = is_open.shape[1]
  if count == length:
    return jnp.broadcast_to(jnp.arange(length), is_open.shape)
  noise = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, step), (length,)))(row_keys)
  return jax.lax.top_k(jnp.where(is_open, noise, -1.0), count)[1]


@functools.partial(jax.jit, static_argnames=('graphdef', 'rule', 'policy', 'count', 'layout'))
def _adaptive(graphdef, params, row_keys, generated, orders, first, end, *, rule, policy, count,
              layout):
  """By position: tokens, step, log-probabilities and ranks of the open entries first .. end-1."""
  model = nnx.merge(graphdef, params)
  batch, length = orders.shape
  rows, index = jnp.arange(batch), jnp.arange(length)
  layers, cache = parallel.start(model, generated, orders, first, layout)
  token_keys, candidate_keys = jnp.moveaxis(jax.vmap(jax.random.split)(row_keys), 1, 0)
  by_position = lambda x: jnp.zeros_like(x).at[rows[:, None], orders].set(x)
  last = jnp.maximum(first - 1, 0)[:, None]
  take_last = lambda x: jnp.take_along_axis(x, last, axis=1)[:, 0]
  only_ids = SamplingRule(num_ids=rule.num_ids)

  def body(step, carry):
    cache, is_open, token, position, tokens, turn, log_prob, rank = carry
    target = _candidates(candidate_keys, step, is_open, count)
    copies = lambda x: jnp.broadcast_to(x[:, None], target.shape)
    visible = jnp.broadcast_to(cache.valid[:, None], (batch, count, cache.valid.shape[1]))
    past = [Past(*layer, visible, jnp.eye(count, dtype=bool)) for layer in cache.layers]
    hidden, new = model.extend(Items(copies(token), copies(position), target), layers, past)
    logits = model.logits(hidden)
    score = certainty(transform(logits, only_ids), policy)
    best = jnp.argmax(jnp.where(is_open[rows[:, None], target], score, -jnp.inf), axis=1)
    active = is_open.any(axis=1)
    chosen, logits = target[rows, best], logits[rows, best]
    drawn = jax.vmap(sample_categorical)(
        jax.vmap(jax.random.fold_in)(token_keys, first + step), transform(logits, rule))
    winners = [(k[rows, best][:, None], v[rows, best][:, None]) for k, v in new]
    cache = cache_lib.write(cache, winners, 0, 1, layout.prompt + step, active[:, None])
    put = lambda old, new: old.at[rows, chosen].set(jnp.where(active, new, old[rows, chosen]))
    found = (drawn, jnp.full(batch, step), *token_details(logits, drawn))
    is_open = is_open.at[rows, chosen].set(False)
    return cache, is_open, drawn, chosen, *map(put, (tokens, turn, log_prob, rank), found)

  is_open = by_position((index >= first[:, None]) & (index < end[:, None]))
  position = jnp.where(first == 0, NONE_POSITION, take_last(orders))
  unknown = jnp.full(orders.shape, GIVEN)
  carry = (cache, is_open, take_last(generated), position, by_position(generated), unknown,
           jnp.full(orders.shape, jnp.nan), unknown)
  begin = 0
  for slots in layout.slots:
    carry = (cache_lib.grow(carry[0], slots), *carry[1:])
    carry = jax.lax.fori_loop(begin, slots - layout.prompt, body, carry)
    begin = slots - layout.prompt
  return carry[4:]


def adaptive(model: AOGPT, key: jax.Array, orders: jax.Array, *, policy: str = 'confidence',
             candidates: int = 0, rule: SamplingRule = parallel.DEFAULT_RULE,
             tokens: jax.Array | None = None, prompt_length: int | np.ndarray = 0,
             end: np.ndarray | None = None, rows: np.ndarray | None = None) -> parallel.Generation:
  """Generates one token a step, always at the position of which the model is surest.

  Args:
    model: an AOGPT that is told its target.
    key: typed PRNG key; a row depends on (key, its number) alone.
    orders: (B, n) int32; only the first prompt_length entries, and which entries lie before `end`,
      matter: the order of the rest is chosen here.
    policy: 'confidence', 'entropy' or 'margin', see `certainty`.
    candidates: positions that compete at each step, drawn at random; 0: all that are open.
    rule: of the draws; the choice of a position ignores all of it but num_ids.
    tokens, prompt_length, end, rows: as in `generate_record`.

  Returns:
    A Generation; its `step` is the order that was chosen.

  Raises:
    UserError: for an encoder, a model of one order, or impossible options.
  """
  check(isinstance(model, AOGPT) and model.config.knows_target, 'model', type(model).__name__,
        'must be a decoder that is told its target position')
  check_choice('policy', policy, POLICIES)
  check(candidates >= 0, 'candidates', candidates, 'must be at least 0 (all)')
  orders, tokens, first, end = parallel.prepare(model, orders, tokens, prompt_length, end)
  batch, length = orders.shape
  steps = int((end - first).max())
  if steps == 0:
    return parallel.nothing_generated(tokens)
  prompt = int(first.max())
  layout = parallel.Layout(prompt, 1, cache_lib.cut(prompt, prompt + steps), 'causal')
  graphdef, params = nnx.split(model)
  row_keys = keys.row_keys(key, jnp.arange(batch) if rows is None else jnp.asarray(rows))
  generated = jnp.take_along_axis(tokens, orders, axis=1)
  return parallel.Generation(*_adaptive(
      graphdef, params, row_keys, generated, orders, jnp.asarray(first, jnp.int32),
      jnp.asarray(end, jnp.int32), rule=rule.validate(), policy=policy,
      count=min(candidates or length, length), layout=layout))
