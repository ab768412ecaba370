"""--mode=sample: texts from a trained run."""

import dataclasses
import logging
import pathlib

from aogpt_jax import lm as lm_lib
from aogpt_jax.config import Config, SampleConfig
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import outputs

log = logging.getLogger(__name__)


def describe(options: SampleConfig, order: str, length: int) -> str:
  """How texts come about, in a few words: 'random order, 16 steps, temperature 0.8, top-p 0.8'."""
  order = 'random' if order == 'uniform' else order
  how = {'parallel': f'{options.steps or length} steps', 'sequential': f'{length} steps',
         'speculative': f'speculative with window {options.window}',
         'adaptive': f'adaptive by {options.policy}'}[options.sampler]
  return f'{order} order, {how}, temperature {options.temperature}, top-p {options.top_p}'


def show(lm: lm_lib.LanguageModel, options: SampleConfig,
         destination: outputs.Destination = outputs.TERMINAL) -> None:
  """Writes the samples, and prints the filled template if there is one, to stdout."""
  length = lm.model.config.context_length
  if options.num_samples:
    caption = describe(options, options.order or lm.generation_order, length)
    if not destination.output:
      print(f'{options.num_samples} samples of {length} tokens, each generated in {caption}:\n')
    outputs.write(lm.sample_completions(options), destination, options.num_samples, caption)
  if options.infill:
    (filled,) = lm.complete([options.infill], dataclasses.replace(options, num_samples=1, steps=0))
    print(f'A hole filled:\n  {options.infill}\n  {filled.text}\n')


def run(config: Config, workdir: pathlib.Path,
        destination: outputs.Destination = outputs.TERMINAL) -> None:
  """Samples from the newest checkpoint in `workdir` as `config.sample` says.

  Model, data and tokenizer are the run's own; no other section of `config` is used.
  """
  lm = lm_lib.load(workdir)
  log.info('step %d of %s; only the sample section of --config is used', lm.step, workdir)
  options = config.sample
  if options.infill:
    try:
      lm_lib.check_template(options.infill, lm.tokenizer, lm.config)
    except UserError as error:  # the template came with the config, perhaps that of another run
      log.warning('sample.infill is left out: %s', error)
      options = dataclasses.replace(options, infill='')
  show(lm, options, destination)


