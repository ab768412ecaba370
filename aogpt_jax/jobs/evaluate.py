"""--mode=evaluate: perplexities of any corpus, ensembles over context orders, quality of texts."""

import dataclasses
import logging
import math
import pathlib
from typing import Any

import jax
import numpy as np
import tqdm
from flax import nnx

from aogpt_jax import (
  config as config_lib,
  data,
  distributed,
  evaluation,
  lm as lm_lib,
  sharding as sharding_lib,
)
from aogpt_jax.config import Config
from aogpt_jax.data import corpora, tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.evaluation import generation
from aogpt_jax.report import plots, tables

log = logging.getLogger(__name__)

COLUMNS = ('corpus', 'order', 'nats_per_token', 'error_over_orders', 'error_over_blocks',
           'perplexity', 'perplexity_error', 'perplexity_per_word', 'bits_per_byte', 'num_draws',
           'num_blocks', 'num_tokens', 'context_length')
ENSEMBLE_COLUMNS = ('corpus', 'num_ensembles', 'nats_per_token', 'error_over_positions',
                    'error_over_blocks', 'gain', 'gain_error', 'perplexity', 'perplexity_error',
                    'bits_per_byte', 'num_blocks', 'items', 'of_full_forwards', 'of_exact')
QUALITY_COLUMNS = ('steps', 'top_p', 'temperature', 'perplexity', 'perplexity_error', 'entropy',
                   'entropy_error', 'distinct_1', 'distinct_2', 'distinct_3', 'repetition',
                   'length', 'num_texts')


def _units(nats_per_token: float, prepared: Any, tokenizer: tokenizers.ByteTokenizer,
           ) -> tables.Row:
  """Per byte of the blocks' text, and per word: the corpus' words by the share of its bytes."""
  counts = prepared.token_counts
  nats, num_bytes = nats_per_token * counts.sum(), tokenizer.count_bytes(counts)
  num_words = prepared.num_words * num_bytes / prepared.num_bytes
  return {'perplexity_per_word': float(np.exp(nats / num_words)),
          'bits_per_byte': float(nats / math.log(2) / num_bytes)}


def _perplexity_row(corpus: str, estimate: evaluation.Estimate, prepared: Any,
                    tokenizer: tokenizers.ByteTokenizer) -> tables.Row:
  errors = [e for e in (estimate.error_over_orders, estimate.error_over_blocks) if e == e]
  log.info('%s, %s: %.4f nats per token', corpus, estimate.order, estimate.nats_per_token)
  return (dataclasses.asdict(estimate) | _units(estimate.nats_per_token, prepared, tokenizer) | {
      'corpus': corpus, 'num_ensembles': 0, 'perplexity': estimate.perplexity,
      'perplexity_error': estimate.perplexity * math.hypot(*errors) if errors else math.nan,
      'context_length': prepared.block_length})


def _ensemble_row(corpus: str, estimate: evaluation.EnsembleEstimate, prepared: Any,
                  tokenizer: tokenizers.ByteTokenizer) -> tables.Row:
  e = estimate
  part = f' ({e.num_blocks} blocks)' if e.num_blocks < prepared.num_blocks else ''
  return (dataclasses.asdict(e) | _units(e.nats_per_token, prepared, tokenizer) | {
      'corpus': corpus, 'order': f'uniform, ensemble of {e.num_ensembles}{part}',
      'perplexity': e.perplexity, 'perplexity_error': e.perplexity * e.error_over_blocks,
      'of_full_forwards': e.items / e.full_forward_items, 'of_exact': e.items / e.exact_items,
      'context_length': prepared.block_length})


def _sizes(largest: int) -> list[int]:
  """1, 2, 4, … and the largest."""
  return sorted({largest, *(2 ** i for i in range(largest.bit_length()) if 2 ** i <= largest)})


def perplexities(config: Config, lm: lm_lib.LanguageModel, corpora_: list[str], orders: list[str],
                 directory: pathlib.Path) -> tuple[list[tables.Row], list[tables.Row]]:
  """Results of every corpus in every order, and those of ensembles.

  Args:
    config: eval, mesh and data.directory are used.
    lm: the model; it is laid out on the mesh.
    corpora_: specs, see `data.corpora`.
    orders: names; [] for those that the model knows.
    directory: where packed blocks are written.
  """
  mesh = sharding_lib.make_mesh(config.mesh)
  sharding_lib.check_batch(mesh, 'eval.batch_size', config.eval.batch_size)
  graphdef, params = nnx.split(lm.model)
  shardings = sharding_lib.state_shardings(mesh, nnx.to_pure_dict(params))
  params = jax.tree.map(lambda p, s: sharding_lib.global_array_from_all_rows(np.asarray(p), s),
                        nnx.to_pure_dict(params), shardings)
  block_nll = evaluation.make_block_nll(graphdef, shardings, mesh)
  step_nll = evaluation.make_step_nll(graphdef, shardings, mesh)
  run_config = dataclasses.replace(lm.config, eval=config.eval)
  rows, ensembles = [], []
  for corpus in corpora_:
    prepared = distributed.first_then_rest(lambda corpus=corpus: data.prepare(
        directory, corpus, lm.tokenizer, lm.model.config.context_length, config.data.workers))
    blocks = data.open_blocks(prepared)
    for name in orders or evaluation.known_orders(lm.config):
      log.info('%s, %s: %s blocks', corpus, name, f'{len(blocks):,}')
      found = evaluation.estimate(run_config, block_nll, params, blocks, mesh, name)
      rows.append(_perplexity_row(corpus, found, prepared, lm.tokenizer))
    if config.eval.num_ensembles:
      some = evaluation.evenly_spaced(blocks, config.eval.ensemble_blocks)
      log.info('%s, ensembles of up to %d context orders: %s blocks', corpus,
               config.eval.num_ensembles, f'{len(some):,}')
      curve = evaluation.evaluate_ensemble(
          block_nll, step_nll, params, some, mesh, _sizes(config.eval.num_ensembles),
          config.eval.ensemble_steps, config.eval.batch_size)
      ensembles += [_ensemble_row(corpus, e, prepared, lm.tokenizer) for e in curve]
  return rows, ensembles


def _check(config: Config, lm: lm_lib.LanguageModel, corpora_: list[str], orders: list[str],
           ) -> None:
  """What can be wrong before anything is computed."""
  settings, model = config.eval, lm.config.model
  config_lib.check(not settings.num_ensembles or (
      model.architecture == 'decoder' and model.knows_target), 'eval.num_ensembles',
      settings.num_ensembles, 'must be 0 for this model: only a decoder that is told its next '
      'position reads a context in several orders')
  config_lib.check(settings.ensemble_steps <= model.context_length, 'eval.ensemble_steps',
                   settings.ensemble_steps, f'must be at most the {model.context_length} tokens of '
                   'a block')
  if not hasattr(lm.tokenizer, 'end_of_text_id'):
    raise UserError('this model came without a tokenizer, so a corpus cannot be read: name the one '
                    'that it was trained with, such as --tokenizer=gpt2')
  for corpus in corpora_:
    corpora.check_corpus(corpus)
  for name in orders:
    lm.order(name)


def _perplexity_page(config: Config, lm: lm_lib.LanguageModel, corpora_: list[str],
                     orders: list[str], workdir: pathlib.Path, output: pathlib.Path, about: Any,
                     ) -> str:
  _check(config, lm, corpora_, orders)
  directory = config.data.directory or workdir / 'data'
  rows, ensembles = perplexities(config, lm, corpora_, orders, directory)
  parts = ['Perplexity per token ± standard error', tables.grid(rows + ensembles, 'order', 'corpus',
                                                                'order'),
           tables.markdown(rows, COLUMNS)]
  if ensembles:
    parts.append(tables.markdown(ensembles, ENSEMBLE_COLUMNS))
  page = '\n\n'.join(parts)
  if not distributed.is_first():
    return page
  tables.write(output, 'perplexity', rows + ensembles, about, page)
  (output / 'ensemble.png').unlink(missing_ok=True)  # that of an earlier call
  if ensembles:
    plots.ensemble_curve(output / 'ensemble.png', ensembles, 'Ensembles over context orders')
  return page


def _quality_page(config: Config, lm: lm_lib.LanguageModel, judge_spec: str, output: pathlib.Path,
                  about: Any) -> str:
  """The grid of steps × (top-p, temperature): every cell's texts have the same orders and seed."""
  length, settings = lm.model.config.context_length, config.eval
  steps = sorted({min(s, length) for s in settings.generation_steps})
  judge = generation.make_judge(judge_spec)
  cells = [(s, p, t) for p, t in zip(settings.top_ps, settings.temperatures) for s in steps]
  rows = []
  for s, top_p, temperature in tqdm.tqdm(cells, unit='cell', leave=False, disable=None):
    log.info('%d texts in %d steps, top-p %s, temperature %s', config.sample.num_samples, s, top_p,
             temperature)
    options = dataclasses.replace(config.sample, sampler='parallel', steps=s, top_p=top_p,
                                  temperature=temperature)
    found = list(lm.sample_completions(options))
    quality = generation.quality([c.text for c in found], [c.tokens for c in found], judge)
    rows.append({'steps': s, 'top_p': top_p, 'temperature': temperature,
                 'decoding': f'top-p {top_p}, T {temperature}'} | dataclasses.asdict(quality))
  page = '\n\n'.join([
      f'Perplexity of {config.sample.num_samples} texts of {length} tokens under {judge_spec} '
      '± standard error, by steps', tables.grid(rows, 'decoding', 'steps', 'decoding'),
      tables.markdown(rows, QUALITY_COLUMNS)])
  tables.write(output, 'generation', rows, about | {'judge': judge_spec}, page)
  plots.generation_grid(output / 'generation.png', rows, f'{config.sample.num_samples} texts of '
                        f'{length} tokens')
  return page


def run(config: Config, workdir: pathlib.Path, source: pathlib.Path | None = None,
        corpora_: list[str] | None = None, orders: list[str] | None = None, judge: str = '',
        output: pathlib.Path | None = None, tokenizer: str = '') -> None:
  """Prints the tables of a model, and writes them as Markdown, JSON and CSV, with plots as PNG.

  Args:
    config: eval, sample, mesh and data.directory are used.
    workdir: where blocks and results are written.
    source: the model: a run directory, one step of it, or a reference file x.pt; None: workdir.
    corpora_: specs; None: config.data.validation.
    orders: names of orders; None: those that the model knows.
    judge: of generated texts, instead of perplexities; see `generation.make_judge`.
    output: directory of the results; None: WORKDIR/evaluation.
    tokenizer: of a source that has none, see `lm.load`.

  Raises:
    UserError: for a model, corpus, order or judge that there is not or that does not fit.
  """
  config_lib.check(not judge or jax.process_count() == 1, '--judge', judge, 'is for one process: '
                   'leave out --distributed or --coordinator')
  others = {'--corpus': corpora_, '--order': orders,
            'eval.num_ensembles': config.eval.num_ensembles}
  for name, value in others.items():
    config_lib.check(not (judge and value), name, value, 'is not used with --judge, which replaces '
                     'the perplexities by the quality of texts; leave one of them out')
  source, output = source or workdir, output or workdir / 'evaluation'
  distributed.on_first(lambda: tables.make_directory(output))
  lm = distributed.together(lambda: lm_lib.load(source, config.eval.ema, tokenizer))
  about = {'source': str(source), 'step': lm.step, 'ema': config.eval.ema,
           'tokenizer_fingerprint': lm.tokenizer.fingerprint}
  weights = 'EMA' if config.eval.ema else 'raw'
  print(f'{source}, step {lm.step}, {weights} weights, context '
        f'{lm.model.config.context_length} tokens\n', flush=True)
  if judge:
    page = _quality_page(config, lm, judge, output, about)
  else:
    page = _perplexity_page(config, lm, list(dict.fromkeys(corpora_ or [config.data.validation])),
                            list(dict.fromkeys(orders or [])), workdir,
                            output, about)
  print(f'{page}\n\nWritten to {output}/')
