"""Generation with a masked encoder: every step runs the whole sequence again.

When each position is revealed is drawn before any token (Lemma 1 of the paper: the law is that of
masked diffusion). Then step s fills the positions whose turn it is, given all that came earlier.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import keys
from aogpt_jax.config import check
from aogpt_jax.model import MaskedEncoder
from aogpt_jax.sampling.logits import (
  DEFAULT_RULE,
  SamplingRule,
  sample_categorical,
  token_details,
  transform,
)
from aogpt_jax.sampling.schedules import GIVEN, reveal_fractions


def _without_empty_steps(turns: np.ndarray) -> np.ndarray:
  """Renumbers each row's turns 0, 1, 2, …, so that its steps which reveal nothing vanish."""
  by_turn = np.argsort(turns, axis=1)
  in_order = np.take_along_axis(turns, by_turn, axis=1)
  new = np.diff(in_order, axis=1, prepend=GIVEN) > 0
  dense = np.empty_like(turns)
  np.put_along_axis(dense, by_turn, np.cumsum(new, axis=1, dtype=turns.dtype) - 1, axis=1)
  return dense


def _largest_group(turns: np.ndarray) -> int:
  """The most positions that one row reveals in one step, rounded up to 2^k: it is compiled in."""
  num_turns = int(turns.max()) + 2  # GIVEN is the first
  cells = np.arange(len(turns))[:, None] * num_turns + turns + 1
  sizes = np.bincount(cells.ravel(), minlength=len(turns) * num_turns).reshape(-1, num_turns)
  return min(1 << (int(sizes[:, 1:].max()) - 1).bit_length(), turns.shape[1])


@functools.partial(jax.jit, static_argnames=('graphdef', 'rule', 'group'))
def _fill(graphdef, params, row_keys, tokens, turns, num_steps, *, rule, group):
  """Fills `tokens` (B, n) step by step; the head sees the positions of the step alone.

  Returns tokens, log-probabilities (nan where given) and ranks (GIVEN where given), (B, n) each.
  """
  model = nnx.merge(graphdef, params)
  batch, length = tokens.shape
  by_turn = jnp.argsort(turns, axis=1)  # positions in the order of being revealed
  rows = jnp.arange(batch)[:, None]
  draw_row = lambda k, at, logits: jax.vmap(sample_categorical)(keys.row_keys(k, at), logits)

  def body(step, carry):
    tokens, log_prob, rank = carry
    hidden = model.hidden(tokens, turns >= step)
    first = (turns < step).sum(axis=1)
    at = jax.vmap(lambda p, f: jax.lax.dynamic_slice(p, (f,), (group,)))(by_turn, first)
    logits = model.logits(jnp.take_along_axis(hidden, at[..., None], axis=1))
    law = transform(logits, rule, rule.temperature_at(step, turns.max(axis=1) + 1))
    drawn = jax.vmap(draw_row)(row_keys, at, law)
    # A slice may hold positions of other steps: they keep what they have.
    put = lambda old, new: old.at[rows, at].set(
        jnp.where(turns[rows, at] == step, new, old[rows, at]))
    return tuple(map(put, carry, (drawn, *token_details(logits, drawn))))

  carry = tokens, jnp.full(tokens.shape, jnp.nan), jnp.full(tokens.shape, GIVEN)
  return jax.lax.fori_loop(0, num_steps, body, carry)


def fill(model: MaskedEncoder, row_keys: jax.Array, tokens: jax.Array, turns: np.ndarray,
         rule: SamplingRule, skip_empty_steps: bool = True,
         ) -> tuple[jax.Array, jax.Array, jax.Array, int]:
  """Draws every token at its turn, given those of earlier turns.

  Args:
    model: a MaskedEncoder.
    row_keys: (B,) typed PRNG keys; the token at (b, i) uses (row_keys[b], i).
    tokens: (B, n) int32; those with turn GIVEN are given and never changed.
    turns: (B, n) int32, the step of each position, or GIVEN.
    rule: temperature, top-p and the ids that may be drawn.
    skip_empty_steps: a row's steps that reveal nothing cost nothing; the tokens are the same.

  Returns:
    tokens (B, n) int32, their log-probabilities (nan where given) and ranks (GIVEN where given) as
    in `Generation`, and how many forward passes of the whole batch it took.
  """
  turns = np.asarray(turns)
  if skip_empty_steps:
    turns = _without_empty_steps(turns)
  num_steps = int(turns.max()) + 1
  graphdef, params = nnx.split(model)
  group = _largest_group(turns) if num_steps else 1
  filled = _fill(graphdef, params, row_keys, jnp.asarray(tokens, jnp.int32), jnp.asarray(turns),
                 num_steps, rule=rule.validate(), group=group)
  return *filled, num_steps


def ancestral(model: MaskedEncoder, key: jax.Array, batch_size: int, length: int, steps: int, *,
              schedule: str = 'linear', rule: SamplingRule = DEFAULT_RULE,
              skip_empty_steps: bool = True) -> tuple[jax.Array, int]:
  """Ancestral sampling of masked diffusion in `steps` steps (the paper's baseline, Figure 4).

  Each token leaves its mask in step s with a probability of its own, u_s - u_{s-1} with the
  fractions u of the schedule, so a step reveals a random number of tokens, possibly none.

  Args:
    model: a MaskedEncoder.
    key: typed PRNG key; row b depends on (key, b) alone.
    batch_size, length: B and n.
    steps: at least 1; may exceed n.
    schedule: 'linear' or 'cosine'.
    rule: temperature, top-p and the ids that may be drawn.
    skip_empty_steps: False runs all `steps` passes, as the paper's baseline does.

  Returns:
    tokens (B, n) int32, and the number of forward passes.

  Raises:
    UserError: for an impossible option.
  """
  check(isinstance(model, MaskedEncoder), 'model', type(model).__name__, 'must be a MaskedEncoder')
  for name, value in (('batch_size', batch_size), ('steps', steps)):
    check(isinstance(value, int) and value >= 1, name, value, 'must be an integer of at least 1')
  check(1 <= length <= model.config.context_length, 'length', length,
        f'must be in 1..{model.config.context_length}, the context_length of this model')
  turn_key, token_key = jax.random.split(key)
  noise = jax.vmap(lambda k: jax.random.uniform(k, (length,)))(
      keys.row_keys(turn_key, jnp.arange(batch_size)))
  # u_s is the fraction revealed after step s; the last is 1, which noise < 1 never reaches.
  turns = np.searchsorted(reveal_fractions(schedule, steps), np.asarray(noise), side='right')
  tokens = jnp.zeros((batch_size, length), jnp.int32)
  row_keys = keys.row_keys(token_key, jnp.arange(batch_size))
  filled = fill(model, row_keys, tokens, turns.astype(np.int32), rule, skip_empty_steps)
  return filled[0], filled[-1]
