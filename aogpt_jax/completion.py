"""Templates to texts: batches of rows with their own prompts and holes, through any sampler."""

import functools
import itertools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import keys, orders as orders_lib, sampling, templates
from aogpt_jax.config import SampleConfig
from aogpt_jax.data.tokenizers import Tokenizer
from aogpt_jax.model import AOGPT, MaskedEncoder
from aogpt_jax.sampling.parallel import known_counts
from aogpt_jax.sampling.schedules import GIVEN, reveal_turns

log = logging.getLogger(__name__)


class Completion(NamedTuple):
  """A filled template.

  text: known text is the template's own, byte for byte. pieces: the text of each token; joined,
  they are the text. tokens: (n,) int32. order: (holes,) int32, the positions in the order of being
  filled. step, rank: (n,) int32, GIVEN (-1) where known; log_prob: (n,) float32 nats under the
  model before temperature and top-p, nan where known.
  """

  text: str
  pieces: list[str]
  tokens: np.ndarray
  order: np.ndarray
  step: np.ndarray
  log_prob: np.ndarray
  rank: np.ndarray


class Row(NamedTuple):
  """A template to be filled once; `number` among all rows of the call decides its noise."""

  number: int
  template: templates.Template
  order: np.ndarray


def make_rows(parsed: list[templates.Template], num_samples: int,
              order: orders_lib.OrderDistribution, seed: int) -> list[Row]:
  """num_samples rows of each template; known tokens come first, in the order of their positions."""
  key, rows = keys.stream_key(seed, 'order'), []
  for template in parsed:
    positions = np.arange(len(template.tokens))
    holes = positions[~template.known]
    for _ in range(num_samples):
      filled = holes
      if len(holes):
        filled = holes[np.asarray(order.sample(key, 1, len(holes), first_row=len(rows))[0])]
      rows.append(Row(len(rows), template, np.concatenate([positions[template.known], filled])))
  return rows


def _batches(rows: list[Row], batch_size: int, same_length: bool) -> Iterator[list[Row]]:
  groups = [rows]
  if same_length:  # an encoder sees every position, so padding would not be neutral
    length = lambda row: len(row.order)
    groups = [list(group) for _, group in itertools.groupby(sorted(rows, key=length), length)]
  for group in groups:
    for start in range(0, len(group), batch_size):
      yield group[start:start + batch_size]


def _pad(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Tokens and orders (B, n) of the longest row; how many each row knows, and has in all, (B,)."""
  length = max(len(row.order) for row in rows)
  tokens, orders = np.zeros((2, len(rows), length), np.int32)
  for b, row in enumerate(rows):
    n = len(row.order)
    tokens[b, :n] = row.template.tokens
    orders[b] = np.concatenate([row.order, np.arange(n, length)])
  known = np.array([row.template.known.sum() for row in rows])
  return tokens, orders, known, np.array([len(row.order) for row in rows])


@functools.partial(jax.jit, static_argnames='graphdef')
def _details(graphdef, params, tokens, orders):
  """Log-probabilities and ranks of all tokens along given orders, by position; (B, n) each."""
  model = nnx.merge(graphdef, params)
  hidden = jnp.moveaxis(model.hidden(tokens, orders), 1, 0)
  generated = jnp.take_along_axis(tokens, orders, axis=1).T
  # One step of the order at a time: the logits of all would not fit for a large vocabulary.
  found = jax.lax.map(lambda x: sampling.token_details(model.logits(x[0]), x[1]),
                      (hidden, generated))
  rows = jnp.arange(len(tokens))[:, None]
  return [jnp.zeros_like(x.T).at[rows, orders].set(x.T) for x in found]


def _speculative_record(model: AOGPT, key: jax.Array, tokens: np.ndarray, orders: np.ndarray,
                        known: np.ndarray, end: np.ndarray, numbers: np.ndarray,
                        rule: sampling.SamplingRule, window: int) -> sampling.Generation:
  """A speculation as a Generation; its steps are the places in the order, whatever the calls."""
  found = sampling.speculative(model, key, orders, window=window, rule=rule, tokens=tokens,
                               prompt_length=known, end=end, rows=numbers)
  count = lambda x: int(np.asarray(x).sum())
  log.info('%d tokens in %d calls (%.3f calls a token), %d of %d drafts accepted',
           count(end - known), count(found.calls), count(found.calls) / max(count(end - known), 1),
           count(found.accepted), count(found.drafted))
  steps = known_counts('linear', known, end, 0) if (end > known).any() else end[:, None]
  step = reveal_turns(orders, steps)
  graphdef, params = nnx.split(model)
  log_prob, rank = _details(graphdef, params, found.tokens, jnp.asarray(orders))
  given = step == GIVEN
  return sampling.Generation(found.tokens, step, np.where(given, np.nan, log_prob),
                             np.where(given, GIVEN, rank))


def fill_batch(model: AOGPT | MaskedEncoder, rows: list[Row], rule: sampling.SamplingRule,
               options: SampleConfig) -> sampling.Generation:
  """Fills the rows of one batch; a row's result does not depend on the others."""
  tokens, orders, known, end = _pad(rows)
  key = keys.stream_key(options.seed, 'sample')
  numbers = np.array([row.number for row in rows])
  if options.sampler == 'speculative':
    return _speculative_record(model, key, tokens, orders, known, end, numbers, rule,
                               options.window)
  if options.sampler == 'adaptive':
    return sampling.adaptive(
        model, key, orders, policy=options.policy, candidates=options.candidates, rule=rule,
        tokens=tokens, prompt_length=known, end=end, rows=numbers)
  steps = 0 if options.sampler == 'sequential' else min(options.steps, int((end - known).max()))
  return sampling.generate_record(
      model, key, orders, steps=steps, schedule=options.schedule, rule=rule, tokens=tokens,
      prompt_length=known, end=end, rows=numbers)


def complete(model: AOGPT | MaskedEncoder, tokenizer: Tokenizer, rows: list[Row],
             options: SampleConfig) -> Iterator[Completion]:
  """Fills all rows, batch by batch, and yields them in the order given.

  Raises:
    UserError: for an impossible option.
  """
  rule = sampling.SamplingRule(
      options.temperature, options.top_p, tokenizer.vocab_size, options.top_k, options.min_p,
      options.final_temperature).validate()
  done, ready = {}, 0
  for batch in _batches(rows, options.batch_size, isinstance(model, MaskedEncoder)):
    record = jax.tree.map(np.asarray, fill_batch(model, batch, rule, options))
    for b, row in enumerate(batch):
      done[row.number] = _completion(row, tokenizer, *(field[b] for field in record))
    while ready in done:
      yield done.pop(ready)
      ready += 1


def _completion(row: Row, tokenizer: Tokenizer, tokens: np.ndarray, step: np.ndarray,
                log_prob: np.ndarray, rank: np.ndarray) -> Completion:
  n = len(row.order)
  pieces = templates.pieces(row.template, tokenizer, tokens[:n])
  order = row.order[row.template.known.sum():]
  order = order[np.argsort(step[order], kind='stable')]  # adaptive: it was chosen on the way
  return Completion(''.join(pieces), pieces, tokens[:n], order.astype(np.int32), step[:n],
                    log_prob[:n], rank[:n])


def as_json(completion: Completion) -> dict:
  """Plain lists for one line of JSON: no text pieces; null where a token was given."""
  given = completion.step == GIVEN
  return {
      'text': completion.text, 'tokens': completion.tokens.tolist(),
      'order': completion.order.tolist(),
      'step': [None if g else int(s) for g, s in zip(given, completion.step)],
      'log_prob': [None if g else round(float(p), 6) for g, p in zip(given, completion.log_prob)],
      'rank': [None if g else int(r) for g, r in zip(given, completion.rank)]}
