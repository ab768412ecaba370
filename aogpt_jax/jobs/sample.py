"""--mode=sample: texts from a trained run."""

import dataclasses
import logging
import pathlib

from aogpt_jax import lm as lm_lib
from aogpt_jax.config import Config, SampleConfig
from aogpt_jax.errors import UserError

log = logging.getLogger(__name__)


def show(lm: lm_lib.LanguageModel, options: SampleConfig) -> None:
  """Prints the samples, and the filled template if there is one, to stdout."""
  rule = dict(temperature=options.temperature, top_p=options.top_p, seed=options.seed)
  if options.num_samples:
    length = lm.model.config.context_length
    order = 'a random' if lm.generation_order == 'uniform' else lm.generation_order
    print(f'{options.num_samples} samples of {length} tokens, each generated in {order} order in '
          f'{options.steps or length} steps (temperature {options.temperature}, '
          f'top-p {options.top_p}):\n')
    texts = lm.sample(options.num_samples, steps=options.steps, **rule)
    for i, text in enumerate(texts, start=1):
      print(f'--- {i}\n{text}')
    print('---\n')
  if options.infill:
    print(f'A hole filled:\n  {options.infill}\n  {lm.infill(options.infill, **rule)[0]}\n')


def run(config: Config, workdir: pathlib.Path) -> None:
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
  show(lm, options)
