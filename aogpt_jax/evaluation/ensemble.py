"""Ensembles over context orders (paper eq. 7), computed from prefixes alone.

A decoder's p(x_σ(t) | x_σ(<t)) depends on the order in which the context is read, though the law
that it learns does not. The ensemble averages the probability over M orders of the context:
member 0 reads it as it was generated, the others in uniformly random order.

Member 0 costs one forward pass for all n steps of a block. Every other member's step t costs its
own t + 1 items, padded to one of a few lengths: about n/2 on average, where a full forward pass
costs n. A sample of K steps a block is enough for an estimate of the mean: the plain NLL is known
at every step, so that only the (small) difference to it has to be estimated.
"""

import dataclasses
import functools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import data, keys, objective, orders as orders_lib, sharding as sharding_lib
from aogpt_jax.config import check
from aogpt_jax.evaluation.perplexity import order_draw, standard_error
from aogpt_jax.model import AOGPT

log = logging.getLogger(__name__)

LENGTHS = 16  # prefixes are padded to one of so many lengths, each compiled once

# (params, tokens (R, n), orders (R, n), at (R,), length) -> (R,) nats; see objective.step_nll.
StepNLL = Callable[..., jax.Array]


def make_step_nll(graphdef: nnx.GraphDef, param_shardings: Any, mesh: jax.sharding.Mesh,
                  ) -> StepNLL:
  """Compiles `objective.step_nll` for rows spread over a mesh."""
  rows = sharding_lib.batch_sharding(mesh)

  @functools.partial(jax.jit, static_argnums=4, in_shardings=(param_shardings, rows, rows, rows),
                     out_shardings=sharding_lib.replicated(mesh))
  @functools.partial(sharding_lib.on_mesh, mesh)
  def step_nll(params, tokens, orders, at, length):
    return objective.step_nll(nnx.merge(graphdef, params), tokens, orders, at, length)

  def placed(params, *arrays_and_length):
    *arrays, length = arrays_and_length
    place = lambda x: sharding_lib.global_array_from_all_rows(np.asarray(x), rows)
    return step_nll(params, *map(place, arrays), length)
  return placed


def _single_device(model: AOGPT) -> tuple[StepNLL, Any]:
  graphdef, params = nnx.split(model)
  return jax.jit(lambda params, *args: objective.step_nll(nnx.merge(graphdef, params), *args),
                 static_argnums=4), params


def permute_context(key: jax.Array, order: jax.Array, at: jax.Array) -> jax.Array:
  """Puts the first `at` entries of an order (n,) in uniformly random order; the rest stays."""
  place = jnp.arange(len(order), dtype=jnp.uint32)
  # Half of all integers for the context, the other half for what follows it.
  shuffled, fixed = jax.random.bits(key, (len(order),)) >> 1, jnp.uint32(2**31) + place
  rank = jnp.where(place < at.astype(jnp.uint32), shuffled, fixed)
  return order[jnp.argsort(rank)]


@jax.jit
def member_orders(key: jax.Array, orders: jax.Array, block: jax.Array, at: jax.Array,
                  member: int | jax.Array) -> jax.Array:
  """The orders of one member, each with its context permuted by (key, block, at, member) alone.

  Args:
    key: typed PRNG key.
    orders: (R, n) int32.
    block: (R,) int32, the number of each row's block.
    at: (R,) int32, steps: the first at[r] entries are the context.
    member: from 1; member 0 is the orders themselves.

  Returns:
    (R, n) int32.
  """
  def row(order, block, at):
    row_key = functools.reduce(jax.random.fold_in, (block, at, member), key)
    return permute_context(row_key, order, at)
  return jax.vmap(row)(orders, block, at)


def _padded_length(at: np.ndarray, n: int) -> np.ndarray:
  """Items computed for the steps `at`: at + 1 rounded up to one of LENGTHS lengths."""
  step = -(-n // LENGTHS)
  return np.minimum((at // step + 1) * step, n)


def _calls(at: np.ndarray, n: int, batch_size: int, multiple: int = 1,
           ) -> Iterator[tuple[np.ndarray, int, int]]:
  """Cuts entries into calls of about equal cost: (indices into `at`, rows, items a row).

  All calls of one length have one number of rows, a multiple of `multiple`.
  """
  lengths = _padded_length(at, n)
  for length in np.unique(lengths).tolist():
    chosen = np.flatnonzero(lengths == length)
    calls = -(-len(chosen) // (batch_size * (n // length)))
    rows = -(-len(chosen) // (calls * multiple)) * multiple
    for start in range(0, len(chosen), rows):
      yield chosen[start:start + rows], rows, length


def score_entries(step_nll: StepNLL, params: Any, tokens: np.ndarray,
                  contexts: Callable[[np.ndarray, np.ndarray], Any], block: np.ndarray,
                  at: np.ndarray, batch_size: int, multiple: int = 1) -> tuple[np.ndarray, int]:
  """NLL of single steps, each from its prefix alone.

  Args:
    step_nll, params: as in `objective.step_nll`.
    tokens: (blocks, n) int32.
    contexts: (block (R,), at (R,)) -> orders (R, n).
    block, at: (E,) int32: entry e is step at[e] of tokens[block[e]].
    batch_size: whole blocks' worth of items in one call, at most.
    multiple: the rows of a call are a multiple of it.

  Returns:
    (E,) float64 nats, and how many items were computed, padding included.
  """
  nll, items = np.zeros(len(at)), 0
  for chosen, rows, length in _calls(at, tokens.shape[1], batch_size, multiple):
    filled = np.resize(chosen, rows)  # repeats entries where they run out
    found = step_nll(params, tokens[block[filled]], contexts(block[filled], at[filled]),
                     at[filled], length)
    nll[chosen] = np.asarray(found)[:len(chosen)]
    items += rows * length
  return nll, items


def context_nll(model: AOGPT, tokens: np.ndarray, context_orders: np.ndarray,
                batch_size: int = 16) -> np.ndarray:
  """NLL of every step under given orders of its context.

  Args:
    model: a decoder.
    tokens: (B, n) int32.
    context_orders: (B, n, M, n) int32; entry [b, t, m] is the order of row b whose first t entries
      member m has permuted.
    batch_size: rows of n items in one call.

  Returns:
    (B, n, M) float64 nats.
  """
  step_nll, params = _single_device(model)
  blocks, n, members = context_orders.shape[:3]
  block, at = _all_entries(blocks, n)
  return np.stack([
      score_entries(step_nll, params, tokens, lambda b, t, m=m: context_orders[b, t, m], block, at,
                    batch_size)[0].reshape(blocks, n) for m in range(members)], axis=-1)


def _all_entries(blocks: int, n: int) -> tuple[np.ndarray, np.ndarray]:
  block, at = np.divmod(np.arange(blocks * n, dtype=np.int32), np.int32(n))
  return block, at


def ensemble_curve(members: Iterator[np.ndarray] | Sequence[np.ndarray], sizes: Sequence[int],
                   ) -> dict[int, np.ndarray]:
  """NLL of ensembles of the first 1, 2, … members: {size: nats}, each of a member's shape.

  Args:
    members: nats of member 0, 1, …, each an array of one shape.
    sizes: the sizes wanted.
  """
  curve, total = {}, None
  for count, nll in enumerate(members, start=1):
    total = -np.asarray(nll, np.float64) if total is None else np.logaddexp(total, -nll)
    if count in sizes:
      curve[count] = math.log(count) - total if count > 1 else np.asarray(nll, np.float64)
  return curve


def ensemble_nll(model: AOGPT, tokens: np.ndarray, orders: np.ndarray, num_ensembles: int,
                 key: jax.Array, batch_size: int = 16) -> np.ndarray:
  """-log of the mean over context orders of p(x_σ(t) | x_σ(<t)) (eq. 7), exactly at every step.

  Args:
    model: a decoder.
    tokens: (B, n) int32.
    orders: (B, n) int32, row b a permutation.
    num_ensembles: M, at least 1; member 0 is the plain `objective.token_nll`.
    key: of the permutations; those of row b depend on (key, b, t, member).
    batch_size: rows of n items in one call.

  Returns:
    (B, n) float64 nats in generation order.

  Raises:
    UserError: for num_ensembles below 1 or shapes that differ.
  """
  check(num_ensembles >= 1, 'num_ensembles', num_ensembles, 'must be at least 1')
  tokens, orders = np.asarray(tokens, np.int32), np.asarray(orders, np.int32)
  step_nll, params = _single_device(model)
  plain = jax.jit(objective.token_nll)(model, tokens, orders)
  block, at = _all_entries(*tokens.shape)

  def members():
    yield np.asarray(plain, np.float64)
    for m in range(1, num_ensembles):
      contexts = lambda b, t, m=m: member_orders(key, orders[b], b, t, m)
      nll, _ = score_entries(step_nll, params, tokens, contexts, block, at, batch_size)
      yield nll.reshape(tokens.shape)
  return ensemble_curve(members(), [num_ensembles])[num_ensembles]


@dataclasses.dataclass(frozen=True)
class EnsembleEstimate:
  """Mean NLL of an ensemble over the tokens of blocks in one uniform order each; nats per token.

  error_over_positions: standard error from scoring some steps of a block alone; 0 for all steps.
  error_over_blocks: standard error from the choice of blocks, the former included.
  gain, gain_error: nats per token less than without an ensemble on the same blocks, and the
    standard error of that difference, which is far smaller than that of either.
  items: computed up to this size, padding included. full_forward_items: of n · M full forward
    passes a block. exact_items: of all steps, each from its prefix.
  """

  num_ensembles: int
  nats_per_token: float
  error_over_positions: float
  error_over_blocks: float
  gain: float
  gain_error: float
  num_blocks: int
  steps_per_block: int
  items: int
  full_forward_items: int
  exact_items: int

  @property
  def perplexity(self) -> float:
    return math.exp(self.nats_per_token)


def _choose_steps(blocks: int, n: int, steps: int) -> np.ndarray:
  """Steps (blocks, steps) int32 of each block: all, or a uniform choice without replacement."""
  if steps == n:
    return np.tile(np.arange(n, dtype=np.int32), (blocks, 1))
  rng = np.random.default_rng(0)  # the same steps for every model
  return np.stack([np.sort(rng.choice(n, steps, replace=False)) for _ in range(blocks)]
                  ).astype(np.int32)


def _plain(block_nll: Callable[..., jax.Array], params: Any, tokens: np.ndarray,
           orders: np.ndarray, mesh: jax.sharding.Mesh, batch_size: int) -> np.ndarray:
  rows = sharding_lib.batch_sharding(mesh)
  place = lambda x: sharding_lib.global_array_from_all_rows(x, rows)
  found = []
  for batch, weights, index in data.eval_batches(tokens, batch_size):
    nll = block_nll(params, place(batch), place(orders[index]))
    found.append(np.asarray(nll, np.float64)[weights > 0])
  return np.concatenate(found)


def per_block_nats(plain: np.ndarray, chosen: np.ndarray, ensembled: np.ndarray,
                   ) -> tuple[np.ndarray, float]:
  """The mean of each block from some of its steps, with the plain NLL as a control variate.

  Args:
    plain: (blocks, n) nats at every step without an ensemble.
    chosen: (blocks, K) steps, a uniform choice without replacement.
    ensembled: (blocks, K) nats at the chosen steps.

  Returns:
    Unbiased means (blocks,), and the standard error of their mean from the choice of steps.
  """
  blocks, steps = chosen.shape
  difference = ensembled - np.take_along_axis(plain, chosen, axis=1)
  variance = difference.var(axis=1, ddof=1) / steps * (1 - steps / plain.shape[1])
  return plain.mean(axis=1) + difference.mean(axis=1), float(np.sqrt(variance.sum()) / blocks)


def evaluate_ensemble(block_nll: Callable[..., jax.Array], step_nll: StepNLL, params: Any,
                      blocks: Any, mesh: jax.sharding.Mesh, sizes: Sequence[int], steps: int,
                      batch_size: int) -> list[EnsembleEstimate]:
  """The curve of ensembles over context orders, all sizes in one pass.

  Block i is scored in the order of draw 0 of `evaluate`; permutations depend on (i, t, member).

  Args:
    block_nll, step_nll: from `make_block_nll` and `make_step_nll`.
    params: nested dict of arrays.
    blocks: random access, blocks[i] (n,) int32; all are held in memory.
    mesh: where the batches go.
    sizes: ensemble sizes, increasing, such as 1, 2, 4, 8.
    steps: generation steps of a block that are scored, a random choice; 0 or n: all of them.
    batch_size: rows of n items in one call.

  Returns:
    One estimate a size.

  Raises:
    UserError: for steps of 1 or above n.
  """
  import tqdm
  tokens = np.stack([blocks[i] for i in range(len(blocks))]).astype(np.int32)
  count, n = tokens.shape
  steps = steps or n
  check(2 <= steps <= n, 'eval.ensemble_steps', steps, f'must be in 2..{n} (the standard error '
        'needs 2), or 0 for all')
  draw = jax.jit(order_draw(orders_lib.make('uniform')), static_argnums=2)
  orders = np.asarray(draw(0, jnp.arange(count), n))
  plain = _plain(block_nll, params, tokens, orders, mesh, batch_size)
  chosen = _choose_steps(count, n, steps)
  flat = np.repeat(np.arange(count, dtype=np.int32), steps), chosen.reshape(-1)
  # Contexts of 0 and 1 token have one order.
  several = flat[1] >= 2
  block, at = (x[several] for x in flat)
  key, devices = keys.stream_key(0, 'eval', 0), mesh.shape['data'] * mesh.shape['fsdp']
  items = {1: -(-count // batch_size) * batch_size * n}

  def members():
    base = np.take_along_axis(plain, chosen, axis=1).reshape(-1)
    yield base
    for m in tqdm.trange(1, max(sizes), desc='context orders', leave=False,
                         disable=not sys.stderr.isatty()):
      nll = base.copy()
      contexts = lambda b, t, m=m: member_orders(key, orders[b], b, t, m)
      nll[several], computed = score_entries(step_nll, params, tokens, contexts, block, at,
                                             batch_size, devices)
      items[m + 1] = items[m] + computed
      if m + 1 in sizes:
        log.info('%d context orders: %s items so far', m + 1, f'{items[m + 1]:,}')
      yield nll

  prefix_items = int(_padded_length(np.arange(2, n), n).sum())
  estimates = []
  for size, nll in ensemble_curve(members(), sizes).items():
    per_block, error = per_block_nats(plain, chosen, nll.reshape(count, steps))
    gain = plain.mean(axis=1) - per_block
    estimates.append(EnsembleEstimate(
        size, float(per_block.mean()), error, standard_error(per_block), float(gain.mean()),
        standard_error(gain), count, steps, items[size], count * n * n * size,
        count * (n + (size - 1) * prefix_items)))
  return estimates
