"""--mode=train: from a config and an empty (or interrupted) directory to a trained model."""

import contextlib
import fcntl
import functools
import importlib.util
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
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
from aogpt_jax.data import tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import prepare, sample
from aogpt_jax.training import checkpoints, loop, metrics, step as step_lib, telemetry

log = logging.getLogger(__name__)

# What makes a run; --overwrite deletes these and nothing else. Packed blocks in data/ stay: they
# lie under a hash of what they were made of, so another run cannot mistake them for its own.
# Compiled programs in compilation_cache/ stay for the same reason.
RUN_FILES = ('config.json', 'tokenizer.model', 'metrics.jsonl', 'tensorboard', 'checkpoints',
             'profile', 'evaluation.json', 'evaluation.md', 'evaluation', loop.NONFINITE)


def _make_workdir(workdir: pathlib.Path) -> None:
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / '.writable'
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise UserError(f'--workdir={workdir}: cannot be written: {error.strerror}') from None


def _check_workdir(config: Config, workdir: pathlib.Path, overwrite: bool) -> None:
  """Checks that the directory is empty of runs, or holds one of the same config; or empties it."""
  if not (workdir / 'config.json').exists():
    foreign = [name for name in RUN_FILES if (workdir / name).exists()]
    if foreign:
      raise UserError(f'--workdir={workdir}: holds {", ".join(foreign)} but no config.json, so it '
                      'is not a run; choose another directory')
    return
  old = lm_lib.read_config(workdir)  # also before deleting: another program's file stays
  if overwrite:
    for name in RUN_FILES:
      path = workdir / name
      shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return
  if not old.data.train:
    raise UserError(f'--workdir={workdir}: holds a converted checkpoint, which cannot be trained '
                    'on; choose another directory')
  different = config_lib.differing_fields(old, config)
  if different:
    raise UserError(f'--workdir={workdir}: holds a run with another config: '
                    f'{"; ".join(different)}. Choose another directory, or --overwrite to '
                    'delete that run')


@contextlib.contextmanager
def _only_run(workdir: pathlib.Path) -> Iterator[None]:
  """Holds the directory's lock; the system releases it however the process ends."""
  with open(workdir / '.lock', 'a') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(f'--workdir={workdir}: another process is training here; wait for it, or '
                      'choose another directory') from None
    yield


def _start_run(config: Config, tokenizer: tokenizers.ByteTokenizer,
               workdir: pathlib.Path) -> None:
  """Writes config.json, which makes the directory a run, and then its tokenizer."""
  unfinished = workdir / 'config.json.tmp'
  unfinished.write_text(config_lib.to_json(config))
  os.replace(unfinished, workdir / 'config.json')  # a kill must not leave half a config
  if not (workdir / 'tokenizer.model').exists():
    tokenizer.save(workdir / 'tokenizer.model')


def _check_before_work(config: Config) -> jax.sharding.Mesh:
  """Everything that can be known to be wrong before reading data or compiling."""
  prepare.check(config)
  if config.train.wandb_project and not importlib.util.find_spec('wandb'):
    raise UserError(f'train.wandb_project={config.train.wandb_project!r}: wandb is not installed; '
                    "pip install 'aogpt_jax[wandb]'")
  return check_mesh(config)


def check_mesh(config: Config) -> jax.sharding.Mesh:
  """The mesh of a config, once its batches are known to divide over it."""
  mesh = sharding_lib.make_mesh(config.mesh)
  micro_batch = config.train.batch_size // config.train.accumulation
  name = 'train.batch_size' + ('/accumulation' if config.train.accumulation > 1 else '')
  sharding_lib.check_batch(mesh, name, micro_batch)
  sharding_lib.check_batch(mesh, 'eval.batch_size', config.eval.batch_size)
  return mesh


def _tokenizer(config: Config, workdir: pathlib.Path) -> tokenizers.ByteTokenizer:
  """The run's tokenizer, once the template of the config is known to fit it."""
  tokenizer = prepare.tokenizer(config, workdir)
  if config.sample.infill:  # a template that does not fit must not fail after days of training
    try:
      lm_lib.check_template(config.sample.infill, tokenizer, config)
    except UserError as error:
      raise UserError(f'sample.infill: {error}; --config.sample.infill= leaves it out') from None
  return tokenizer


def _start_state(recipe: step_lib.Recipe, mesh: jax.sharding.Mesh, directory: pathlib.Path,
                 data_state: dict[str, str], allow_older: bool,
                 ) -> tuple[step_lib.TrainState, Any]:
  """The newest checkpoint of the run, or a fresh state; born sharded either way."""
  abstract = jax.eval_shape(lambda: step_lib.init_state(recipe))
  shardings = sharding_lib.state_shardings(mesh, abstract)
  manifest = distributed.on_first(lambda: checkpoints.newest_sound(directory, allow_older))
  if manifest is None:
    return jax.jit(lambda: step_lib.init_state(recipe), out_shardings=shardings)(), shardings
  for name, value in data_state.items():
    if manifest.get(name) != value:
      raise UserError(f'{directory}: the run was trained on {name}={manifest.get(name)}, but '
                      f'the data here has {value}; restore the corpus, or --overwrite the run')
  wanted = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                        abstract, shardings)
  log.info('continuing at step %d', manifest['step'])
  return checkpoints.restore(directory, manifest['step'], wanted), shardings


def _scalars(estimates: list[evaluation.Estimate]) -> dict[str, float]:
  scalars = {}
  for e in estimates:
    scalars[f'validation/{e.order}/nats_per_token'] = e.nats_per_token
    scalars[f'validation/{e.order}/perplexity'] = e.perplexity
  return scalars


def run(config: Config, workdir: pathlib.Path, overwrite: bool = False,
        allow_older_checkpoint: bool = False, profile_steps: str = '') -> None:
  """Trains, or continues, the run of `config` in `workdir`; then evaluates and samples.

  Every process of a run of several calls this; process 0 alone writes and prints.

  Args:
    config: the same in every process.
    workdir: of the run; on a file system that all processes share.
    overwrite: delete the run that is there.
    allow_older_checkpoint: pass over damaged checkpoints to the newest that is sound.
    profile_steps: FIRST:LAST, which are traced into WORKDIR/profile.

  Raises:
    UserError: for a bad config, corpus or directory, a damaged checkpoint, or a loss that is not
      finite. Nothing of an earlier run is lost, unless `overwrite` is set.
  """
  profiler = telemetry.Profiler(telemetry.parse_steps(profile_steps), workdir / 'profile')
  mesh = distributed.together(lambda: _check_before_work(config))
  distributed.check_same('--config', config_lib.to_json(config))
  distributed.on_first(lambda: _make_workdir(workdir))
  with contextlib.ExitStack() as held, loop.StopRequest(mesh) as stop:
    distributed.on_first(lambda: held.enter_context(_only_run(workdir)))
    distributed.on_first(lambda: _check_workdir(config, workdir, overwrite))
    distributed.check_shared(workdir, '--workdir')
    print(f'Config:\n{config_lib.to_json(config)}', flush=True)
    with telemetry.compilation_cache(config.train.compilation_cache, workdir):
      _run(config, workdir, mesh, stop, allow_older_checkpoint, profiler)


def _prepare(config: Config, workdir: pathlib.Path) -> tuple[Any, Any, Any]:
  """Tokenizer, training and validation blocks; the same in every process."""
  def find():
    tokenizer = _tokenizer(config, workdir)
    return tokenizer, *prepare.blocks(config, workdir, tokenizer)
  found = distributed.first_then_rest(find)  # process 0 leaves them on disk for the others
  distributed.check_same('the prepared data', json.dumps(
      [[p.corpus_fingerprint, p.tokenizer_fingerprint, p.num_blocks] for p in found[1:]]))
  return found


def _run(config: Config, workdir: pathlib.Path, mesh: jax.sharding.Mesh, stop: loop.StopRequest,
         allow_older: bool, profiler: telemetry.Profiler) -> None:
  tokenizer, train, validation = _prepare(config, workdir)
  recipe = step_lib.make_recipe(config)
  directory = workdir / 'checkpoints'
  data_state = {'corpus_fingerprint': train.corpus_fingerprint,
                'tokenizer_fingerprint': train.tokenizer_fingerprint}
  state, shardings = _start_state(recipe, mesh, directory, data_state, allow_older)
  start = int(state.step)
  validation_blocks = distributed.together(lambda: data.open_blocks(validation))
  block_nll = evaluation.make_block_nll(recipe.graphdef, shardings.params, mesh)
  block_nll = stop.interrupts(block_nll)
  estimate = functools.partial(evaluation.validate, config, block_nll, blocks=validation_blocks,
                               mesh=mesh)
  batch_sharding = sharding_lib.batch_sharding(mesh)
  rows = sharding_lib.host_rows(batch_sharding, config.train.batch_size)
  batches = distributed.together(lambda: data.train_batches(
      data.open_blocks(train), config.train.batch_size, config.seed, rows=rows, start=start))
  num_params = sum(p.size for p in jax.tree.leaves(state.params))
  log.info('%s parameters; %s training blocks of %d tokens; mesh %s', f'{num_params:,}',
           f'{train.num_blocks:,}', config.model.context_length, dict(mesh.shape))
  log.info('%s', sharding_lib.describe(mesh, state.params))
  # Only here, after every check: a start that failed must not bind the directory to its mistake.
  distributed.on_first(lambda: _start_run(config, tokenizer, workdir))
  writer = metrics.MetricWriter(config, workdir, start)
  try:
    saver = checkpoints.CheckpointWriter(directory, config.train.keep_checkpoints, data_state)
    state = loop.fit(
        config, state, step_lib.jit_step(recipe, shardings, batch_sharding), batches, rows,
        batch_sharding, writer, saver, lambda ema: _scalars(estimate(ema, every_order=False)), stop,
        profiler)
    if int(state.step) >= config.train.num_steps:
      _finish(config, workdir, state, estimate, writer, train, validation_blocks, start)
      ema = _on_one_device(state.ema, mesh) if jax.process_count() > 1 else None
      distributed.on_first(lambda: _show(config, workdir, recipe, tokenizer, ema))
  except loop.Stopped:
    log.info('asked to stop: training is done and saved; the same command evaluates again')
  finally:
    batches.close()
    writer.close()


def _finish(config: Config, workdir: pathlib.Path, state: step_lib.TrainState, estimate: Any,
            writer: metrics.MetricWriter, train: Any, validation_blocks: Any, start: int) -> None:
  """Final validation; writes evaluation.md and .json, and prints to stdout."""
  if start >= config.train.num_steps:
    print(f'This run is done: step {start} of {config.train.num_steps}.')
  estimates = estimate(state.ema)
  if start < config.train.num_steps:
    writer.write(int(state.step), _scalars(estimates))
  if not distributed.is_first():
    return
  unigram = evaluation.unigram_nats(train.token_counts, validation_blocks)
  table = evaluation.markdown_table(estimates, unigram)
  (workdir / 'evaluation.md').write_text(table + '\n')
  (workdir / 'evaluation.json').write_text(json.dumps(
      {'step': int(state.step), 'unigram_nats_per_token': unigram,
       'estimates': [evaluation.as_json(e) for e in estimates]}, indent=2) + '\n')
  print(f'\nValidation ({config.data.validation}, EMA weights, step {int(state.step)})\n')
  print(table + '\n')


def _on_one_device(params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Copies of global arrays on one device of every process, where a process can use them alone."""
  whole = jax.jit(lambda p: p, out_shardings=sharding_lib.replicated(mesh))(params)
  return jax.tree.map(lambda x: x.addressable_data(0), whole)


def _show(config: Config, workdir: pathlib.Path, recipe: step_lib.Recipe,
          tokenizer: tokenizers.ByteTokenizer, ema: Any) -> None:
  """Samples of the finished run, and where everything lies.

  ema: the weights, where several processes hold them; None: they are loaded as a user would.
  """
  if ema is None:
    lm = lm_lib.load(workdir)
  else:  # Orbax would wait for the other processes, which do not sample
    lm = lm_lib.LanguageModel(nnx.merge(recipe.graphdef, ema), tokenizer, config,
                              config.train.num_steps)
  sample.show(lm, config.sample)
  print(f'Everything lies in {workdir}/: checkpoints/, config.json, tokenizer.model,\n'
        'evaluation.md, metrics.jsonl, tensorboard/')
