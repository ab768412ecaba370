"""σ-GPT's token rejection sampling (arXiv 2404.09562): an approximate baseline, not lossless.

A round drafts all open positions from the current context, evaluates the drafts along some random
orders, and keeps the longest accepted prefix of any of them. A refused draft is dropped and drawn
anew, not replaced from the residual law, and the order is chosen by how much it accepts: both bias
texts towards what independent drafts like. `speculative` has the law of the model; this is here to
be compared with. Rows are not cut to the shortest of the batch, so a row is what it is alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import keys
from aogpt_jax.config import check
from aogpt_jax.model import AOGPT
from aogpt_jax.sampling import parallel
from aogpt_jax.sampling.logits import DEFAULT_RULE, SamplingRule, sample_categorical, transform
from aogpt_jax.sampling.speculative import Speculation


def _draft_laws(model: AOGPT, generated: jax.Array, orders: jax.Array, known: jax.Array,
                rule: SamplingRule) -> jax.Array:
  """Logits (B, n, V) of the law of each open entry of the order, all given the known ones alone."""
  batch, length = orders.shape
  # One parallel step that reveals all the rest; static sizes, whatever is known.
  layout = parallel.Layout(length, length, (3 * length,), 'causal')
  plan = parallel.Plan(jnp.stack([known, jnp.full(batch, length)]), jnp.array([length]),
                       jnp.array([1]), jnp.ones(batch, jnp.int32), jnp.array([0, 1]))
  keep = lambda step, state, generated, logits, index, shown: (logits, generated)
  empty = jnp.zeros((batch, length, model.config.vocab_size), jnp.float32)
  padded = jnp.pad(generated, ((0, 0), (0, length)))
  logits, _ = parallel.decode(model, padded, orders, plan, layout, empty, keep)
  place = known[:, None] + jnp.arange(length)
  return empty.at[jnp.arange(batch)[:, None], place].set(transform(logits, rule), mode='drop')


def _shuffled(key: jax.Array, known: jax.Array, length: int) -> jax.Array:
  """(n,) entries of an order: the known ones in place, the others shuffled."""
  index = jnp.arange(length)
  noise = jax.random.uniform(key, (length,))
  return jnp.argsort(jnp.where(index < known, index - length, noise))


@functools.partial(jax.jit, static_argnames=('graphdef', 'rule', 'num_orders'))
def _round(graphdef, params, row_keys, generated, orders, known, *, rule, num_orders):
  """One round: `generated`, `orders` (B, n) and `known` (B,) anew."""
  model = nnx.merge(graphdef, params)
  batch, length = orders.shape
  rows, index = jnp.arange(batch), jnp.arange(length)
  noise = jax.vmap(lambda k: jax.random.split(k, 3))(row_keys)
  laws = _draft_laws(model, generated, orders, known, rule)
  drafts = jax.vmap(sample_categorical)(noise[:, 0], laws)
  generated = jnp.where(index < known[:, None], generated, drafts)
  tokens = jnp.zeros_like(generated).at[rows[:, None], orders].set(generated)

  def along(number):
    """Entries of a random order, and how many of its tokens are accepted, per row."""
    fold = lambda k: jax.random.fold_in(k, number)
    entries = jax.vmap(lambda k, m: _shuffled(fold(k), m, length))(noise[:, 1], known)
    take = lambda x: jnp.take_along_axis(x, entries, axis=1)
    token = take(generated)[..., None]
    of_token = lambda logits: jnp.take_along_axis(
        jax.nn.softmax(logits, axis=-1), token, axis=-1)[..., 0]
    q = of_token(transform(model(tokens, take(orders)), rule))
    p = of_token(jnp.take_along_axis(laws, entries[..., None], axis=1))
    test = jax.vmap(lambda k: jax.random.uniform(fold(k), (length,)))(noise[:, 2])
    certain = index <= known[:, None]  # the first draft's law is its law given the context
    return entries, jnp.cumprod((test * p < q) | certain, axis=1, dtype=jnp.int32).sum(axis=1)

  entries, reached = jax.lax.map(along, jnp.arange(num_orders))
  best = jnp.argmax(reached, axis=0)
  entries = entries[best, rows]
  take = lambda x: jnp.take_along_axis(x, entries, axis=1)
  return take(generated), take(orders), reached[best, rows]


def token_rejection(model: AOGPT, key: jax.Array, orders: jax.Array, *, num_orders: int = 1,
                    rule: SamplingRule = DEFAULT_RULE, tokens: jax.Array | None = None,
                    prompt_length: int | np.ndarray = 0) -> Speculation:
  """Generates by drafting everything and keeping what random orders accept; approximate.

  Args:
    model: an AOGPT that is told its target.
    key: typed PRNG key; row b depends on (key, b) alone.
    orders: (B, n) int32; only the first prompt_length entries of each matter.
    num_orders: random orders that are tried in a round; at least 1.
    rule: temperature, top-p, … of drafts and tests.
    tokens, prompt_length: as in `generate_record`.

  Returns:
    tokens; per row the calls (a draft and a test a round), the drafts tested and those accepted.

  Raises:
    UserError: for an encoder, a model of one order, or impossible options.
  """
  check(isinstance(model, AOGPT) and model.config.knows_target, 'model', type(model).__name__,
        'must be a decoder that is told its target position')
  check(num_orders >= 1, 'num_orders', num_orders, 'must be at least 1')
  orders, tokens, first, _ = parallel.prepare(model, orders, tokens, prompt_length, None)
  batch, length = orders.shape
  generated = jnp.take_along_axis(tokens, orders, axis=1)
  known, row_keys = jnp.asarray(first, jnp.int32), keys.row_keys(key, jnp.arange(batch))
  graphdef, params = nnx.split(model)
  calls, drafted, accepted = np.zeros((3, batch), np.int32)
  while (np.asarray(known) < length).any():
    before = np.asarray(known)
    fold = jax.vmap(jax.random.fold_in)(row_keys, known)
    generated, orders, known = _round(graphdef, params, fold, generated, orders, known,
                                      rule=rule.validate(), num_orders=num_orders)
    active = before < length
    calls += 2 * active
    drafted += (length - before) * active
    accepted += np.asarray(known) - before
  tokens = tokens.at[jnp.arange(batch)[:, None], orders].set(generated)
  return Speculation(tokens, jnp.asarray(calls), jnp.asarray(drafted), jnp.asarray(accepted))
