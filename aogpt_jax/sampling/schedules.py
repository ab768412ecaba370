"""How many tokens are known after each step of parallel generation."""

import numpy as np

from aogpt_jax.config import SCHEDULES, check, check_choice

GIVEN = -1  # turn of a position that is not filled


def reveal_turns(orders: np.ndarray, known: np.ndarray) -> np.ndarray:
  """The step at which each position is revealed.

  Args:
    orders: (B, n) int32 permutations.
    known: (B, steps + 1) tokens of each row known before each step and at the end.

  Returns:
    (B, n) int32 by position; GIVEN where known from the start, or not filled at all.
  """
  index = np.arange(orders.shape[1])
  turn = np.stack([np.searchsorted(row, index, side='right') - 1 for row in known])
  turn[turn == known.shape[1] - 1] = GIVEN
  turns = np.empty(orders.shape, np.int32)
  np.put_along_axis(turns, orders, turn.astype(np.int32), axis=1)
  return turns


def reveal_fractions(kind: str, steps: int) -> np.ndarray:
  """The fraction of the tokens known after each step, (steps,) float32, the last one 1.

  1 - u(τ) with τ from 1 to 0 over the steps; u(τ) = τ (linear) or cos((1-τ)π/2) (cosine).

  Raises:
    UserError: for an unknown kind.
  """
  check_choice('schedule', kind, SCHEDULES)
  remaining = np.linspace(1, 0, steps + 1, dtype=np.float32)
  if kind == 'cosine':
    remaining = np.cos((np.float32(1) - remaining) * np.float32(np.pi / 2))
  return np.float32(1) - remaining[1:]


def reveal_counts(kind: str, length: int, steps: int) -> np.ndarray:
  """Cumulative number of tokens revealed after each step (paper section 4).

  The count is int(length·fraction), but at least one more than before; float32 arithmetic, as the
  reference.

  Args:
    kind: 'linear' or 'cosine'.
    length: tokens to generate.
    steps: forward passes, 1..length.

  Returns:
    (steps,) int64, the last entry is `length`.

  Raises:
    UserError: for an unknown kind or steps outside 1..length.
  """
  check_choice('schedule', kind, SCHEDULES)
  check(1 <= steps <= length, 'steps', steps,
        f'must be in 1..{length}, the number of tokens to generate')
  counts, known = [], 0
  for fraction in reveal_fractions(kind, steps):
    known = max(int(np.float32(length) * fraction), known + 1)
    counts.append(known)
  return np.asarray(counts)
