"""Log-likelihoods of texts, or of spans of them given the rest (arbitrary conditionals)."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from aogpt_jax import objective, orders as orders_lib
from aogpt_jax.config import check
from aogpt_jax.data.tokenizers import Tokenizer
from aogpt_jax.errors import UserError, nearest
from aogpt_jax.model import AOGPT, MaskedEncoder

Span = tuple[int, int]


class Request(NamedTuple):
  """What is to be scored.

  text: a text; it is tokenized piece by piece between the ends of spans.
  spans: [start, end) in characters, not overlapping; scored one after another in this order, each
    given the condition and the spans before it. (): the whole text.
  given: the condition, spans read in this order; None: all that no span covers, in the order of
    the text. What is in neither list is not seen.
  """

  text: str
  spans: tuple[Span, ...] = ()
  given: tuple[Span, ...] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
  """Log-likelihood of a text or its spans.

  nats: total of the scored tokens, negative log. num_tokens: how many these are.
  span_nats, span_tokens: of each span (one, if the whole text was asked for).
  tokens: (n,) int32 of the whole text. order: (num_tokens,) int32, the positions that were scored,
  in that order. token_nats: (num_tokens,) float32, in that order.
  """

  nats: float
  num_tokens: int
  span_nats: tuple[float, ...]
  span_tokens: tuple[int, ...]
  tokens: np.ndarray
  order: np.ndarray
  token_nats: np.ndarray


class Row(NamedTuple):
  """A request in tokens: (n,) ids, a permutation (n,), tokens given, tokens of each span."""

  tokens: np.ndarray
  order: np.ndarray
  given: int
  span_tokens: tuple[int, ...]


def parse_request(record: object) -> Request:
  """Makes a Request of a text or of {"text": …, "spans": [[0, 4], …], "given": [[5, 9], …]}.

  Raises:
    UserError: for anything else.
  """
  if isinstance(record, str):
    return Request(record)
  if not isinstance(record, dict) or not isinstance(record.get('text'), str):
    raise UserError('must be a text, or an object with the text in a string field "text"')
  for name in record:
    if name not in Request._fields:
      raise UserError(f'field "{name}": no such field{nearest(name, Request._fields)}')
  lists = {}
  for name in ('spans', 'given'):
    value = record.get(name)
    if value is None:
      continue
    pairs = isinstance(value, list) and all(
        isinstance(s, list) and len(s) == 2 and all(type(x) is int for x in s) for s in value)
    check(pairs, name, value, 'must be a list of pairs [start, end]')
    lists[name] = tuple(map(tuple, value))
  return Request(record['text'], **lists)


def _cut(request: Request) -> list[Span]:
  """The pieces of a text between all ends of spans; UserError for spans that cannot be."""
  text, named = request.text, (*request.spans, *(request.given or ()))
  check(isinstance(text, str) and text, 'text', text, 'must be a text that is not empty')
  for start, end in named:
    check(0 <= start < end <= len(text), 'span', [start, end],
          f'must have 0 <= start < end <= {len(text)}, the characters of the text')
  inside = sorted(named)
  for left, right in zip(inside, inside[1:]):
    check(left[1] <= right[0], 'span', list(right), f'overlaps {list(left)}')
  check(request.spans or not request.given, 'spans', [], 'must name what to score, with "given"')
  ends = sorted({0, len(text), *(x for span in named for x in span)})
  return list(zip(ends, ends[1:]))


def make_row(request: Request, tokenizer: Tokenizer, context_length: int,
             order: orders_lib.OrderDistribution, key: jax.Array, number: int) -> Row:
  """Tokenizes a request and orders its positions: condition, spans, what is not seen.

  Args:
    request: what to score.
    tokenizer: gives the ids.
    context_length: of the model.
    order: of the tokens inside a span.
    key: of random orders, which depend on (key, number, the number of the span).
    number: of the request within its call.

  Raises:
    UserError: for an empty or too long text, or spans that cannot be.
  """
  pieces = _cut(request)
  ids = [tokenizer.encode(request.text[start:end]) for start, end in pieces]
  tokens = np.concatenate(ids).astype(np.int32)
  check(1 <= len(tokens) <= context_length, 'text', request.text[:40],
        f'has {len(tokens)} tokens, must have 1..{context_length}, the context_length of this '
        'model')
  ends = np.cumsum([len(x) for x in ids]).tolist()
  positions = {piece: np.arange(end - len(x), end) for piece, end, x in zip(pieces, ends, ids)}
  spans = request.spans or ((0, len(request.text)),)
  # Whatever the cuts, a span is made of whole pieces.
  inside = lambda span: np.concatenate([
      at for (start, end), at in positions.items() if span[0] <= start and end <= span[1]])
  given = request.given
  if given is None:
    given = [piece for piece in pieces if not any(s <= piece[0] and piece[1] <= e
                                                  for s, e in spans)]
  condition = [inside(span) for span in given]
  scored = []
  for i, span in enumerate(spans):
    at = inside(span)
    if len(at):
      span_key = key if i == 0 else jax.random.fold_in(key, i)
      at = at[np.asarray(order.sample(span_key, 1, len(at), first_row=number)[0])]
    scored.append(at)
  seen = np.concatenate([*condition, *scored]).astype(int)
  unseen = np.setdiff1d(np.arange(len(tokens)), seen)
  return Row(tokens, np.concatenate([seen, unseen]).astype(np.int32), sum(map(len, condition)),
             tuple(map(len, scored)))


@functools.partial(jax.jit, static_argnames='graphdef')
def _token_nll(graphdef, params, tokens, orders):
  return objective.token_nll(nnx.merge(graphdef, params), tokens, orders)


def _pad(rows: Sequence[Row], length: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokens and orders (B, length). What pads a row comes last, so that its own terms do not see it.
  """
  tokens = np.stack([np.pad(row.tokens, (0, length - len(row.tokens))) for row in rows])
  orders = np.stack([np.concatenate([row.order, np.arange(len(row.order), length)])
                     for row in rows])
  return tokens, orders.astype(np.int32)


def score(model: AOGPT | MaskedEncoder, rows: Sequence[Row], batch_size: int) -> Iterator[Score]:
  """Scores rows batch by batch; a row's result does not depend on the others."""
  graphdef, params = nnx.split(model)
  length = model.config.context_length
  if not isinstance(model, MaskedEncoder):  # an encoder sees every position, so it needs all
    longest = max((len(row.tokens) for row in rows), default=1)
    length = min(length, 1 << (longest - 1).bit_length())
  for start in range(0, len(rows), batch_size):
    batch = rows[start:start + batch_size]
    filled = [*batch, *batch[-1:] * (min(batch_size, len(rows)) - len(batch))]
    nll = np.asarray(_token_nll(graphdef, params, *_pad(filled, length)))
    for row, row_nll in zip(batch, nll):
      yield _score(row, row_nll)


def _score(row: Row, nll: np.ndarray) -> Score:
  count = sum(row.span_tokens)
  scored = slice(row.given, row.given + count)
  token_nats = nll[scored]
  ends = np.cumsum(row.span_tokens)[:-1]
  span_nats = tuple(float(part.sum()) for part in np.split(token_nats.astype(np.float64), ends))
  return Score(sum(span_nats), count, span_nats, row.span_tokens, row.tokens, row.order[scored],
               token_nats)


def as_json(request: Request, score: Score) -> dict:
  """Plain values for one line of JSON."""
  line = {'text': request.text, 'nats': score.nats, 'num_tokens': score.num_tokens}
  if request.spans:
    line['spans'] = [{'start': start, 'end': end, 'nats': nats, 'num_tokens': count}
                     for (start, end), nats, count in zip(request.spans, score.span_nats,
                                                          score.span_tokens)]
  return line | {'tokens': score.tokens.tolist(), 'order': score.order.tolist(),
                 'token_nats': [round(float(x), 6) for x in score.token_nats]}
