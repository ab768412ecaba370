"""Suites generate, growth, top_p, samplers and encoder: what generating texts costs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from aogpt_jax import keys, lm as lm_lib, model as model_lib, orders as orders_lib, sampling
from aogpt_jax.bench import measure, peers, training
from aogpt_jax.bench.results import Row, Table
from aogpt_jax.config import Config, ModelConfig, check
from aogpt_jax.sampling import parallel


def _model(config: ModelConfig) -> Any:
  return model_lib.make(config, rngs=nnx.Rngs(0))


def _rule(config: Config, **changes: Any) -> sampling.SamplingRule:
  return sampling.SamplingRule(config.sample.temperature, config.sample.top_p)._replace(**changes)


def _generate(model: Any, config: Config, length: int, order: str = 'uniform',
              **options: Any) -> Callable[[], jax.Array]:
  """A run: sample.num_samples texts of `length` tokens."""
  key = keys.stream_key(config.sample.seed, 'sample')
  order = orders_lib.make(order).sample(key, config.sample.num_samples, length)
  return lambda: sampling.generate(model, key, order, **options)


def _items(batch: int, length: int, steps: int) -> tuple[int, int]:
  """Items of `batch` texts from nothing: real ones, and padding."""
  known = parallel.known_counts('linear', np.zeros(batch, int), np.full(batch, length), steps)
  real, computed = parallel.count_items(known)
  return real, computed - real


def _describe(config: Config) -> str:
  m, s = config.model, config.sample
  return (f'{m.num_layers} layers, width {m.embed_dim}, vocabulary {m.vocab_size:,}, {m.dtype}, '
          f'random weights, temperature {s.temperature}, top-p {s.top_p}; median (range) of runs '
          'in turn')


def generate(config: Config, peer: str) -> Iterator[Table]:
  """One token a step, in any order and left to right, against `generate` of Hugging Face."""
  model, options, n = config.model, config.sample, config.model.context_length
  peak, peaks = measure.model_peak(model)
  runs = {'aogpt_jax, uniform orders': _generate(_model(model), config, n, rule=_rule(config)),
          "aogpt_jax, left to right, GPT-2's shape": _generate(
              _model(training.gpt_model(model)), config, n, 'left_to_right', rule=_rule(config))}
  other = None
  if peer != 'none':
    other = 'Hugging Face GPT-2, generate() with a cache'
    runs[other] = peers.generation(model, options.num_samples, options.temperature, options.top_p)
  times, rows = measure.interleaved(runs), []
  for name, timing in times.items():
    tokens = options.num_samples * (n - (name == other))  # GPT-2 is given its first token
    rate = measure.rates(timing, tokens)
    against = measure.spread('to_peer', None)
    if other:
      against = measure.spread('to_peer', measure.ratio(times[other], timing))
      scale = tokens / (options.num_samples * (n - 1))
      against = {key: value * scale for key, value in against.items()}
    rows.append(measure.timed(name, timing) | rate | against
                | measure.work(timing, tokens, measure.forward_flops(model), peak))
  yield Table(
      f'{options.num_samples} texts of {n} tokens, one a step, {_describe(config)}',
      ('name', 'tokens_per_second', 'seconds', 'to_peer', 'flops_per_token', 'flops_per_second',
       'share', 'first_seconds', 'runs'), rows,
      (f'One item a token, forward only; attention to all {n} items is counted. The first call '
       f'compiles. {peaks}',))


def growth(config: Config) -> Iterator[Table]:
  """Seconds by length, n to 4n, in n/4 steps and in n, beside the growth of counted items."""
  n, batch = config.model.context_length, config.sample.num_samples
  check(n % 4 == 0, 'model.context_length', n, 'must be a multiple of 4: a step reveals 4 tokens')
  runs, cells = {}, []
  for group in (4, 1):
    for length in (n, 2 * n, 4 * n):
      model = _model(dataclasses.replace(config.model, context_length=length))
      runs[group, length] = _generate(model, config, length, rule=_rule(config),
                                      steps=length // group)
      cells.append((group, length))
  times, rows = measure.interleaved(runs), []
  for group, length in cells:
    real, padding = _items(batch, length, length // group)
    row = ({'length': length, 'steps': length // group, 'items': real, 'padding': padding}
           | measure.timed('', times[group, length])
           | measure.rates(times[group, length], batch * length))
    if length > n:
      before = group, length // 2
      row['items_growth'] = real / _items(batch, length // 2, length // 2 // group)[0]
      row |= measure.spread('seconds_growth', measure.ratio(times[group, length], times[before]))
    rows.append(row)
  yield Table(f'{batch} texts by length, {_describe(config)}',
              ('length', 'steps', 'items', 'padding', 'seconds', 'tokens_per_second',
               'seconds_growth', 'items_growth', 'runs'), rows,
              ('Each length has a model of that context. Attention to the cache grows with the '
               'length, beside the items.',))


def top_p(config: Config) -> Iterator[Table]:
  """The share of a step that cutting the nucleus takes: one text with it and the same without."""
  options = config.sample
  check(options.top_p < 1, 'sample.top_p', options.top_p, 'must be below 1: it is what is measured')
  check(options.temperature > 0, 'sample.temperature', options.temperature,
        'must be above 0: a greedy draw has no nucleus')
  length, model = options.steps or config.model.context_length, _model(config.model)
  rules = {f'top-p {options.top_p}': _rule(config), 'top-p 1': _rule(config, top_p=1.0),
           'greedy': _rule(config, temperature=0.0, top_p=1.0)}
  times = measure.interleaved({
      name: _generate(model, config, length, rule=rule) for name, rule in rules.items()})
  with_rule, rows = times[f'top-p {options.top_p}'], []
  for name, timing in times.items():
    row = measure.timed(name, timing) | measure.rates(timing, options.num_samples * length)
    if timing is not with_rule:
      found = measure.ratio(timing, with_rule)
      row |= {'share_of_rule': 1 - found.value, 'share_of_rule_low': 1 - found.high,
              'share_of_rule_high': 1 - found.low}
    rows.append(row)
  yield Table(
      f'{options.num_samples} texts of {length} tokens, one a step, {_describe(config)}',
      ('name', 'seconds', 'tokens_per_second', 'share_of_rule', 'first_seconds', 'runs'), rows,
      (f'Share: (t(top-p {options.top_p}) - t(this)) / t(top-p {options.top_p}). Attention reads '
       f'a cache of at most {length} items here: in a longer text the share is smaller.',))


def samplers(lm: lm_lib.LanguageModel, config: Config) -> Iterator[Table]:
  """Calls a token, acceptance and time of samplers with the same law, on a trained run."""
  options, length = config.sample, lm.model.config.context_length
  order = lm.order(options.order or lm.generation_order).sample(
      keys.stream_key(options.seed, 'order'), options.num_samples, length)
  rule = sampling.SamplingRule(options.temperature, options.top_p, lm.tokenizer.vocab_size,
                               options.top_k, options.min_p)
  key = keys.stream_key(options.seed, 'sample')
  runs = {'sequential': lambda: sampling.generate(lm.model, key, order, rule=rule)}
  for scheme, window in (('T', 2), ('T', 4), ('FS', 2), ('FS', 4), ('FS', 8)):
    runs[f'speculative {scheme}, window {window}'] = lambda s=scheme, w=window: (
        sampling.speculative(lm.model, key, order, window=w, scheme=s, rule=rule))
  times, rows = measure.interleaved(runs), []
  for name, run in runs.items():
    row = {'calls_per_token': 1.0, 'most_calls': length, 'accepted': None}
    if name != 'sequential':
      found = jax.tree.map(np.asarray, run())
      row = {'calls_per_token': float(found.calls.mean()) / length,
             'most_calls': int(found.calls.max()),
             'accepted': float(found.accepted.sum() / max(found.drafted.sum(), 1))}
    rows.append({'sampler': name} | row | measure.timed(name, times[name])
                | measure.spread('to_sequential', measure.ratio(times['sequential'], times[name])))
  yield Table(f'{options.num_samples} texts of {length} tokens, temperature '
              f'{options.temperature}, top-p {options.top_p}, step {lm.step}; median (range) of '
              f'{measure.REPEATS} runs in turn',
              ('sampler', 'calls_per_token', 'most_calls', 'accepted', 'seconds', 'to_sequential'),
              rows)


def _curve(config: Config) -> list[int]:
  """sample.steps alone, or 64, 128, … up to half the context."""
  n, steps = config.model.context_length, config.sample.steps
  if steps:
    return [steps]
  check(n >= 128, 'model.context_length', n, 'must be at least 128 for the curve over steps; or '
        'give the one number sample.steps')
  return [2 ** i for i in range(6, (n // 2).bit_length())]


def encoder(config: Config) -> Iterator[Table]:
  """A decoder with its cache against an encoder of the same widths (paper Figure 4), untrained."""
  n, batch, steps = config.model.context_length, config.sample.num_samples, _curve(config)
  models = {'decoder': _model(config.model), 'encoder': _model(dataclasses.replace(
      config.model, architecture='encoder', target_injection='none', position_encoding='rotary'))}
  times = measure.interleaved({
      (name, s): _generate(model, config, n, steps=s, rule=_rule(config))
      for s in steps for name, model in models.items()})
  rows: list[Row] = []
  for s in steps:
    real, padding = _items(batch, n, s)
    ours, other = times['decoder', s], times['encoder', s]
    rows.append({'steps': s, 'decoder_items': real, 'padding': padding,
                 'encoder_items': batch * s * n, 'runs': len(ours.seconds),
                 'encoder_runs': len(other.seconds)}
                | measure.spread('decoder_seconds', ours)
                | measure.spread('encoder_seconds', other)
                | measure.spread('to_decoder', measure.ratio(other, ours)))
  yield Table(f'{batch} text{"s" * (batch > 1)} of {n} tokens by steps, {_describe(config)}',
              ('steps', 'decoder_items', 'padding', 'encoder_items', 'decoder_seconds',
               'encoder_seconds', 'to_decoder', 'runs', 'encoder_runs'), rows,
              (f'A run of over {measure.LONG_SECONDS:.0f} s is timed once.',))
