"""--mode=bench: what generation and preparing data cost, both sides of every ratio from one run.

Suites: `samplers`, a trained run through sequential and speculative sampling; `encoder`, a decoder
against the masked encoder of the same widths at the same steps (paper Figure 4); `prepare`, the
tokenizing and packing of data.train against a plain loop in one process; `compile`, compile time
and memory of the training step, by layers and remat; `attention`, dense against blocked.
"""

import dataclasses
import pathlib
import platform
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from aogpt_jax import (
  keys,
  lm as lm_lib,
  model as model_lib,
  orders as orders_lib,
  sampling,
  sharding as sharding_lib,
)
from aogpt_jax.config import REMAT, Config, MeshConfig, check
from aogpt_jax.data import corpora, packing, shards, tokenizers, workers as workers_lib
from aogpt_jax.jobs import prepare as prepare_job
from aogpt_jax.model import attention
from aogpt_jax.sampling import parallel
from aogpt_jax.training import plan as plan_lib

REPEATS = 3


def interleaved(runs: dict[str, Callable[[], Any]], warm_up: bool = True,
                ) -> dict[str, list[float]]:
  """Seconds of each run, REPEATS times in turn; a first, untimed round compiles."""
  times = {name: [] for name in runs}
  for round_ in range(not warm_up, REPEATS + 1):
    for name, run in runs.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      if round_:
        times[name].append(time.perf_counter() - start)
  return times


def _seconds(times: list[float]) -> str:
  return f'{np.median(times):.2f} ({min(times):.2f}–{max(times):.2f})'


def _milliseconds(times: list[float]) -> str:
  low, middle, high = (1e3 * f(times) for f in (min, np.median, max))
  return f'{middle:.1f} ({low:.1f}–{high:.1f})'


def samplers(lm: lm_lib.LanguageModel, config: Config) -> str:
  """Calls a token, acceptance and wall time of samplers with the same law, as a Markdown table."""
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
  times = interleaved(runs)
  lines = [f'{options.num_samples} texts of {length} tokens, temperature {options.temperature}, '
           f'top-p {options.top_p}, step {lm.step}; median of {REPEATS} interleaved runs (range)\n',
           '| sampler | calls a token | most calls of a text | drafts accepted | seconds | '
           'sequential / this |', '|---|---|---|---|---|---|']
  for name, run in runs.items():
    calls, most, accepted = 1.0, length, '–'
    if name != 'sequential':
      found = jax.tree.map(np.asarray, run())
      calls, most = found.calls.mean() / length, found.calls.max()
      accepted = f'{found.accepted.sum() / max(found.drafted.sum(), 1):.2f}'
    ratio = np.median(times['sequential']) / np.median(times[name])
    lines.append(f'| {name} | {calls:.3f} | {most} | {accepted} | {_seconds(times[name])} | '
                 f'{ratio:.2f} |')
  return '\n'.join(lines)


def encoder(config: Config) -> str:
  """A decoder with its cache against an encoder of the same widths, untrained, as a table."""
  n, steps, batch = config.model.context_length, config.sample.steps, config.sample.num_samples
  check(1 <= steps <= n, 'sample.steps', steps, f'must be in 1..{n}, the model.context_length')
  decoder = model_lib.make(config.model, rngs=nnx.Rngs(0))
  masked = model_lib.make(dataclasses.replace(
      config.model, architecture='encoder', target_injection='none', position_encoding='rotary'),
      rngs=nnx.Rngs(0))
  key = keys.stream_key(config.sample.seed, 'sample')
  order = orders_lib.make('uniform').sample(key, batch, n)
  times = interleaved({
      'decoder': lambda: sampling.generate(decoder, key, order, steps=steps),
      'encoder': lambda: sampling.generate(masked, key, order, steps=steps)})
  known = parallel.known_counts('linear', np.zeros(batch, int), np.full(batch, n), steps)
  real, computed = parallel.count_items(known)
  ratio = np.median(times['encoder']) / np.median(times['decoder'])
  return '\n'.join([
      f'{batch} texts of {n} tokens in {steps} steps, width {config.model.embed_dim}, '
      f'{config.model.num_layers} layers; median of {REPEATS} interleaved runs (range)\n',
      '| model | items | padding | seconds |', '|---|---|---|---|',
      f'| decoder | {real:,} | {computed - real:,} | {_seconds(times["decoder"])} |',
      f'| encoder | {batch * steps * n:,} | 0 | {_seconds(times["encoder"])} |',
      f'\nencoder / decoder = {ratio:.1f}'])


def _plain_loop(path: pathlib.Path, corpus: str, tokenizer: tokenizers.ByteTokenizer,
                block_length: int) -> None:
  """What one would write without this package: the other side of `prepare`."""
  from array_record.python import array_record_module
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for block in packing.pack(corpora.read_documents(corpus), tokenizer, block_length):
    writer.write(shards.serialize(block))
  writer.close()


def prepare(config: Config) -> str:
  """data.prepare on data.train against a plain loop over it, as a table."""
  corpus, length = config.data.train, config.model.context_length
  workers = config.data.workers or workers_lib.count_cores()
  with tempfile.TemporaryDirectory(prefix='aogpt-bench-') as folder:
    tokenizer = prepare_job.tokenizer(config, pathlib.Path(folder))

    def plain_loop() -> None:
      with tempfile.TemporaryDirectory(dir=folder) as inside:
        _plain_loop(pathlib.Path(inside) / 'blocks', corpus, tokenizer, length)

    def prepared() -> packing.PreparedData:
      with tempfile.TemporaryDirectory(dir=folder) as inside:
        return packing.prepare(inside, corpus, tokenizer, length, workers)

    size = prepared().num_bytes / 1e6
    times = interleaved({'plain loop': plain_loop, 'prepare': prepared}, warm_up=False)
  lines = [f'{corpus}: {size:,.1f} MB of text, {tokenizer.vocab_size} ids, blocks of {length}, '
           f'{workers_lib.count_cores()} cores; median of {REPEATS} interleaved runs (range)\n',
           '| | processes that tokenize | seconds | MB/s |', '|---|---|---|---|']
  # prepare() starts others only when a corpus is longer than this.
  used = workers if size * 1e6 > workers_lib.POOL_AFTER else 1
  for (name, seconds), processes in zip(times.items(), (1, used)):
    lines.append(f'| {name} | {processes} | {_seconds(seconds)} | '
                 f'{size / np.median(seconds):.2f} |')
  ratio = np.median(times['plain loop']) / np.median(times['prepare'])
  return '\n'.join([*lines, f'\nplain loop / prepare = {ratio:.2f}'])


def attention_(config: Config) -> str:
  """Forward and backward of dense and of blocked attention by length, as a table."""
  lines = [f'{config.model.num_heads} heads of width {config.model.head_dim}, float32, forward and '
           f'backward; median of {REPEATS} interleaved runs (range)\n',
           '| rows × length | dense, ms | blocked, ms | dense / blocked |', '|---|---|---|---|']
  for length in (128, 256, 512, 1024):
    rows = 1024 // length
    shape = (rows, length, config.model.num_heads, config.model.head_dim)
    inputs = [jax.random.normal(jax.random.key(i), shape) for i in range(3)]
    runs = {}
    for name in ('dense', 'blocked'):
      loss = lambda q, k, v, name=name: (attention.attend(q, k, v, None, backend=name) ** 2).sum()
      run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
      runs[name] = lambda run=run, inputs=inputs: run(*inputs)
    times = interleaved(runs)
    ratio = np.median(times['dense']) / np.median(times['blocked'])
    lines.append(f'| {rows} × {length} | {_milliseconds(times["dense"])} | '
                 f'{_milliseconds(times["blocked"])} | {ratio:.2f} |')
  return '\n'.join(lines)


def compile_(config: Config) -> str:
  """Compile time by number of layers, and memory by remat, of the training step, as two tables.

  Nothing is run. The step has the widths of `config`, one micro-batch of 8 rows, and one device.
  """
  mesh = sharding_lib.make_mesh(MeshConfig(), jax.devices()[:1])
  train = dataclasses.replace(config.train, batch_size=8, accumulation=1)

  def plan(quick: bool = True, **changes: Any) -> plan_lib.Plan:
    model = dataclasses.replace(config.model, **changes)
    return plan_lib.plan_step(dataclasses.replace(config, model=model, train=train), mesh, quick)

  lines = ['| layers | traced, s | compiled, s |', '|---|---|---|']
  seconds = {}
  for layers in (4, 24):
    found = plan(quick=False, num_layers=layers)
    seconds[layers] = found.compile_seconds
    lines.append(f'| {layers} | {found.lower_seconds:.1f} | {found.compile_seconds:.1f} |')
  lines += [f'\n24 layers / 4 layers = {seconds[24] / seconds[4]:.2f}\n',
            f'Temporary memory of {config.model.num_layers} layers, 8 rows:\n',
            '| attention | remat | GB |', '|---|---|---|']
  for backend, remat in (('dense', 'none'), *((config.model.attention, r) for r in REMAT)):
    size = plan(attention=backend, remat=remat).temporary_bytes
    lines.append(f'| {backend} | {remat} | {size / 1e9:.2f} |')
  return '\n'.join(lines)


def run(config: Config, workdir: pathlib.Path, suite: str) -> None:
  """Prints the machine, the versions and the table of one suite."""
  device = jax.devices()[0]
  print(f'{platform.machine()} {device.platform} {device.device_kind}, '
        f'{jax.device_count()} devices, jax {jax.__version__}, '
        f'Python {platform.python_version()}\n')
  if suite == 'samplers':
    print(samplers(lm_lib.load(workdir), config))
  else:
    print({'encoder': encoder, 'prepare': prepare, 'compile': compile_,
           'attention': attention_}[suite](config))
