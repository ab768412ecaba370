"""Suites train, attention and compile: what a training step costs in time, compiler and memory."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import (
  keys,
  model as model_lib,
  orders as orders_lib,
  sampling,
  sharding as sharding_lib,
)
from aogpt_jax.bench import measure, peers
from aogpt_jax.bench.results import Row, Table
from aogpt_jax.config import REMAT, Config, MeshConfig, ModelConfig, OrderConfig
from aogpt_jax.model import attention as attention_lib, attention_backends
from aogpt_jax.training import plan as plan_lib, step as step_lib, telemetry

CHUNK = 128  # of the loss in `compile`, where the config does not chunk it
TEXT = 32  # tokens of the generation that `compile` compiles: its loop is compiled once


class Step(NamedTuple):
  """A compiled training step that carries its state. run: one update, on the same batch again."""

  run: Callable[[], Any]
  trace_seconds: float
  compile_seconds: float
  parameters: int


def one_device() -> jax.sharding.Mesh:
  """The mesh of every benchmark: the first device alone."""
  return sharding_lib.make_mesh(MeshConfig(), jax.devices()[:1])


def random_tokens(config: Config, rows: int) -> np.ndarray:
  """(rows, context_length) int32 of uniform ids."""
  return np.random.default_rng(config.seed).integers(
      config.model.vocab_size, size=(rows, config.model.context_length), dtype=np.int32)


def gpt_model(model: ModelConfig) -> ModelConfig:
  """The sizes of `model` in GPT-2's own shape, as configs/small_gpt.py."""
  return dataclasses.replace(
      model, architecture='decoder', target_injection='none', position_encoding='learned',
      norm='layernorm', qk_norm=False, use_bias=True, tie_embeddings=True, head_bias=False)


def make_step(config: Config, tokens: np.ndarray) -> Step:
  """Compiles the step of a config for one device, as `train` does for its mesh."""
  mesh, recipe = one_device(), step_lib.make_recipe(config)
  abstract = plan_lib.abstract_state(config)
  shardings = sharding_lib.state_shardings(mesh, abstract)
  rows = sharding_lib.batch_sharding(mesh)
  placed = sharding_lib.global_array_from_all_rows(tokens, rows)
  start = time.perf_counter()
  lowered = step_lib.jit_step(recipe, shardings, rows).lower(abstract, placed)
  middle = time.perf_counter()
  compiled = lowered.compile()
  end = time.perf_counter()
  carried = [jax.jit(lambda: step_lib.init_state(recipe), out_shardings=shardings)()]

  def run():
    state, metrics = compiled(carried.pop(), placed)  # the old state is donated
    carried.append(state)
    return state, metrics
  return Step(run, middle - start, end - middle,
              sum(p.size for p in jax.tree.leaves(abstract.params)))


def _attention(model: ModelConfig) -> str:
  """The backend that a training step of `model` takes."""
  shape = (1, model.context_length, model.num_heads, model.head_dim)
  return attention_backends.choose(
      model.attention, jax.ShapeDtypeStruct(shape, jnp.dtype(model.dtype)),
      causal=model.architecture == 'decoder', cached=False, platform=jax.default_backend())


def sizes(m: ModelConfig) -> str:
  """Layers, heads, width, vocabulary and dtype, for titles."""
  return (f'{m.num_layers} layers, {m.num_heads} heads, width {m.embed_dim}, vocabulary '
          f'{m.vocab_size:,}, {m.dtype}')


def train(config: Config, peer: str) -> Iterator[Table]:
  """A step of this project and of its own GPT against GPT-2 of Hugging Face."""
  tokens = random_tokens(config, config.train.batch_size)
  gpt = dataclasses.replace(config, model=gpt_model(config.model),
                            order=OrderConfig('left_to_right'))
  peak, peaks = measure.model_peak(config.model)
  steps = {f'aogpt_jax, {config.order.name}': make_step(config, tokens),
           "aogpt_jax, left to right, GPT-2's shape": make_step(gpt, tokens)}
  runs, parameters = {n: s.run for n, s in steps.items()}, {n: s.parameters
                                                            for n, s in steps.items()}
  other = None
  if peer != 'none':
    run, optimizer, count = peers.train_step(config, tokens)
    other = f'Hugging Face GPT-2, sdpa, {optimizer}'
    runs[other], parameters[other] = run, count
  times = measure.interleaved(runs, calls=measure.calls_a_run())
  flops, rows = telemetry.flops_per_token(config.model), []
  for name, timing in times.items():
    compiled = {'trace_seconds': steps[name].trace_seconds,
                'compile_seconds': steps[name].compile_seconds} if name in steps else {}
    rows.append(measure.timed(name, timing) | measure.rates(timing, tokens.size) | compiled
                | measure.work(timing, tokens.size, flops, peak)
                | {'parameters': parameters[name]}
                | measure.spread('to_peer', other and measure.ratio(times[other], timing)))
  counted = plan_lib.counted_flops(config) / tokens.size
  yield Table(
      f'Training step, {config.train.batch_size} × {config.model.context_length} random tokens, '
      f'micro-batches: {config.train.accumulation}; {sizes(config.model)}, attention '
      f'{_attention(config.model)}; median (range) of runs in turn',
      ('name', 'parameters', 'tokens_per_second', 'seconds', 'to_peer', 'flops_per_token',
       'flops_per_second', 'share', 'trace_seconds', 'compile_seconds', 'first_seconds', 'runs'),
      rows, (f'FLOPs a token: 6 a weight in a matmul and 12·L·n·d for attention, the same for '
             'every row; the whole score matrix counts, of which causal attention needs half. XLA '
             f'counts {counted:.4g} for the first row, {counted / flops:.3f} times that. {peaks}',
             'A step is forward, backward, clipping and AdamW; those of aogpt_jax also draw their '
             'orders and keep a weight average.'))


def attention(config: Config) -> Iterator[Table]:
  """Forward and backward of dense and of blocked attention, by length."""
  rows = []
  for length in (128, 256, 512, 1024):
    batch = 1024 // length
    shape = (batch, length, config.model.num_heads, config.model.head_dim)
    inputs = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
    runs = {}
    for name in ('dense', 'blocked'):
      loss = lambda q, k, v, name=name: (
          attention_lib.attend(q, k, v, None, backend=name) ** 2).sum()
      run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
      runs[name] = lambda run=run, inputs=inputs: run(*inputs)
    times = measure.interleaved(runs, calls=measure.calls_a_run())
    rows.append({'batch': batch, 'length': length}
                | measure.spread('dense_seconds', times['dense'])
                | measure.spread('blocked_seconds', times['blocked'])
                | measure.spread('to_blocked', measure.ratio(times['dense'], times['blocked'])))
  yield Table(f'{config.model.num_heads} heads of width {config.model.head_dim}, float32, forward '
              f'and backward; median (range) of {measure.REPEATS} runs in turn',
              ('batch', 'length', 'dense_seconds', 'blocked_seconds', 'to_blocked'), rows)


def _plan(config: Config, quick: bool = True, **changes: Any) -> plan_lib.Plan:
  """Plan of a step of 8 rows in one micro-batch, on one device."""
  return plan_lib.plan_step(dataclasses.replace(
      config, model=dataclasses.replace(config.model, **changes),
      train=dataclasses.replace(config.train, batch_size=8, accumulation=1)), one_device(), quick)


def _first_generation(config: Config) -> Row:
  """The first call of `sampling.generate` beside a later one: what is between them compiled."""
  length = min(TEXT, config.model.context_length)
  model = model_lib.make(config.model, rngs=nnx.Rngs(0))
  key = keys.stream_key(config.sample.seed, 'sample')
  order = orders_lib.make('uniform').sample(key, 8, length)
  rule = sampling.SamplingRule(config.sample.temperature, config.sample.top_p)
  run = lambda: sampling.generate(model, key, order, rule=rule)
  first, later = measure.seconds_a_call(run), measure.seconds_a_call(run)
  return {'name': f'generation of 8 × {length} tokens', 'layers': config.model.num_layers,
          'compile_seconds': first - later, 'first_seconds': first, 'later_seconds': later}


def _compilation(config: Config) -> Table:
  rows, compiled = [], {}
  own = config.model.num_layers, config.model.scan_layers
  for layers, scan in dict.fromkeys((own, (4, True), (24, True))):
    plan = _plan(config, quick=False, num_layers=layers, scan_layers=scan)
    compiled[layers, scan] = plan.compile_seconds
    rows.append({'name': 'training step, ' + ('one loop' if scan else 'layers written out'),
                 'layers': layers, 'trace_seconds': plan.lower_seconds,
                 'compile_seconds': plan.compile_seconds})
  rows.append(_first_generation(config))
  return Table(f'Compilation, 8 rows of {config.model.context_length}, {sizes(config.model)}',
               ('name', 'layers', 'trace_seconds', 'compile_seconds', 'first_seconds',
                'later_seconds'), rows,
               (f'24 layers / 4 layers = {compiled[24, True] / compiled[4, True]:.2f} (compiled, '
                'as a loop)', 'For generation, compiled is the first call less a later one.'))


def memory_of_loss(config: Config) -> Table:
  """XLA's plan of a step whose logits exist in chunks against one where all of them do."""
  chunk, rows = config.model.loss_chunk or CHUNK, []
  for name, size in ((f'chunks of {chunk} steps', chunk), ('all at once', 0)):
    plan = _plan(config, loss_chunk=size)
    rows.append({'logits': name, 'temporary_bytes': plan.temporary_bytes,
                 'all_bytes': plan.argument_bytes + plan.temporary_bytes})
  for row in rows:
    row |= {f'{name}_share': row[f'{name}_bytes'] / rows[-1][f'{name}_bytes']
            for name in ('temporary', 'all')}
  return Table(f'Memory of a step by XLA\'s plan, 8 × {config.model.context_length}, '
               f'{sizes(config.model)}, attention {_attention(config.model)}, remat '
               f'{config.model.remat}',
               ('logits', 'temporary_bytes', 'temporary_share', 'all_bytes', 'all_share'), rows)


def compile_(config: Config) -> Iterator[Table]:
  """Compile time of step and generation, and memory of the step by loss and by remat."""
  yield _compilation(config)
  yield memory_of_loss(config)
  rows = [{'attention': backend, 'remat': remat,
           'temporary_bytes': _plan(config, attention=backend, remat=remat).temporary_bytes}
          for backend, remat in (('dense', 'none'), *((config.model.attention, r) for r in REMAT))]
  yield Table(f'Temporary memory by XLA\'s plan, 8 × {config.model.context_length}, '
              f'{sizes(config.model)}', ('attention', 'remat', 'temporary_bytes'), rows)
