"""Scores of texts and spans: the chain rule, what is seen and what is not, bad requests."""

import jax
import numpy as np
import pytest

import aogpt_jax
from aogpt_jax import objective, orders as orders_lib, scoring
from aogpt_jax.errors import UserError
from aogpt_jax.scoring import Request

TEXT = 'One two three four'
A, B, C = (0, 7), (7, 13), (13, 18)


@pytest.fixture(scope='module')
def lm(text_run):
  return aogpt_jax.load(text_run)


@pytest.mark.parametrize('spans', [(A, B, C), (C, A, B), (B, C)])
def test_spans_add_up_to_the_joint(lm, spans):
  """Each span asked for by itself, given the earlier ones, against all of them in one request."""
  joint, *single = lm.score([Request(TEXT, spans, ())] + [
      Request(TEXT, (span,), spans[:i]) for i, span in enumerate(spans)])
  assert abs(joint.nats - sum(s.nats for s in single)) < 1e-4
  np.testing.assert_allclose(joint.span_nats, [s.nats for s in single], rtol=0, atol=1e-4)
  assert joint.nats > 5  # 1e-4 is far below what there is to get wrong


def test_a_span_is_scored_given_the_rest(lm):
  """By hand: the rest in the order of the text, then the span; other text after it is not seen."""
  start, end = 4, 13
  (score,) = lm.score([Request(TEXT, ((start, end),))])
  left, span, right = (lm.tokenizer.encode(t) for t in (TEXT[:start], TEXT[start:end], TEXT[end:]))
  tokens = np.concatenate([left, span, right])
  place = np.arange(len(tokens))
  inside = (place >= len(left)) & (place < len(left) + len(span))
  order = np.concatenate([place[~inside], place[inside]]).astype(np.int32)
  nll = objective.token_nll(lm.model, tokens[None], order[None])[0]
  np.testing.assert_allclose(score.token_nats, nll[-len(span):], rtol=0, atol=1e-5)
  np.testing.assert_array_equal(score.tokens, tokens)
  np.testing.assert_array_equal(score.order, place[inside])
  assert score.num_tokens == len(span) == score.span_tokens[0]
  assert score.nats == pytest.approx(score.token_nats.sum())


def test_what_is_neither_span_nor_given_is_not_seen(lm):
  """Another last word of as many tokens changes a span that is given it, and only that."""
  ids = lm.tokenizer.encode(' four')
  other = next(text for text in (' nine', ' five', ' once', ' more')
               if len(lm.tokenizer.encode(text)) == len(ids))
  texts = [TEXT, TEXT.replace(' four', other)]
  blind, seeing = ([s.nats for s in lm.score([Request(t, (B,), given) for t in texts])]
                   for given in ((A,), None))
  assert blind[0] == blind[1] and seeing[0] != seeing[1]


def test_a_score_does_not_depend_on_its_batch(lm):
  """Rows of other lengths beside it, another batch size; random orders by the place in the call."""
  texts = [TEXT, 'One', 'ten nine eight seven six', 'two']
  together = lm.score(texts, order='uniform', seed=3)
  for size in (1, 3):
    cut = lm.score(texts, order='uniform', seed=3, batch_size=size)
    np.testing.assert_allclose([s.nats for s in cut], [s.nats for s in together], atol=1e-4)
    assert [s.order.tolist() for s in cut] == [s.order.tolist() for s in together]
  assert sorted(together[0].order) == list(range(together[0].num_tokens))
  assert together[0].order.tolist() != list(range(together[0].num_tokens))


@pytest.mark.parametrize(('request_', 'message'), [
    (Request(''), "text 1: text='': must be a text that is not empty"),
    (Request('x' * 99), 'has 99 tokens, must have 1..16'),
    (Request(TEXT, ((0, 19),)), r'span=\[0, 19\]: must have 0 <= start < end <= 18'),
    (Request(TEXT, ((3, 3),)), r'span=\[3, 3\]: must have 0 <= start < end'),
    (Request(TEXT, ((0, 5), (4, 6))), r'span=\[4, 6\]: overlaps \[0, 5\]'),
    (Request(TEXT, (A,), ((6, 9),)), 'overlaps'),
    (Request(TEXT, (), (A,)), r'spans=\[\]: must name what to score')])
def test_impossible_requests(lm, request_, message):
  with pytest.raises(UserError, match=message):
    lm.score([request_])


@pytest.mark.parametrize(('record', 'message'), [
    (3, 'must be a text, or an object'), ({'text': 3}, 'string field "text"'),
    ({'text': 'a', 'span': []}, 'field "span": no such field; did you mean "spans"'),
    ({'text': 'a', 'spans': [[0]]}, 'must be a list of pairs'),
    ({'text': 'a', 'spans': [[0, 1.5]]}, 'must be a list of pairs')])
def test_records_that_are_no_request(record, message):
  with pytest.raises(UserError, match=message):
    scoring.parse_request(record)


def test_records():
  assert scoring.parse_request('a') == Request('a')
  record = {'text': 'abc', 'spans': [[0, 1]], 'given': [[2, 3]]}
  assert scoring.parse_request(record) == Request('abc', ((0, 1),), ((2, 3),))
  assert scoring.parse_request({'text': 'abc', 'given': None}) == Request('abc')


def test_a_model_of_one_order_scores_beginnings_alone(lm):
  """A GPT is not told the next position: a span must follow what it is given."""
  import dataclasses

  from flax import nnx

  from aogpt_jax import config as config_lib, model as model_lib
  config = dataclasses.replace(
      lm.config, order=config_lib.OrderConfig('left_to_right'), model=dataclasses.replace(
          lm.config.model, target_injection='none', position_encoding='learned'))
  gpt = dataclasses.replace(lm, config=config, model=model_lib.make(config.model, rngs=nnx.Rngs(0)))
  (score,) = gpt.score([Request(TEXT, (B,), (A,))])
  ids = np.concatenate([gpt.tokenizer.encode(TEXT[s:e]) for s, e in (A, B, C)])
  order = orders_lib.make('left_to_right').sample(jax.random.key(0), 1, len(ids))
  nll = np.asarray(objective.token_nll(gpt.model, ids[None], order))[0]
  np.testing.assert_allclose(score.token_nats, nll[score.order], rtol=0, atol=1e-5)
  with pytest.raises(UserError, match='knows the order left_to_right only'):
    gpt.score([Request(TEXT, (B,))])
