"""--mode=infill: holes filled, from the command line, a file of lines, or stdin."""

import dataclasses
import logging
import pathlib

from aogpt_jax import lm as lm_lib
from aogpt_jax.config import Config
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import inputs, outputs, sample

log = logging.getLogger(__name__)


def run(config: Config, workdir: pathlib.Path, destination: outputs.Destination,
        text: str | None, path: str | None) -> None:
  """Fills every template config.sample.num_samples times; JSON lines unless it is one text."""
  texts = inputs.read(text, path, 'infill', 'a text with <mask:k>')
  lm = lm_lib.load(workdir)
  for number, template in enumerate(texts, start=1):
    try:
      lm_lib.check_template(template, lm.tokenizer, lm.config)
    except UserError as error:
      where = '--text' if path is None else f'--input={path}: template {number}'
      raise UserError(f'{where}: {error}') from None
  options = dataclasses.replace(config.sample, num_samples=max(1, config.sample.num_samples))
  if path is not None and not destination.output:
    destination = destination._replace(output='-')
  log.info('step %d of %s; only the sample section of --config is used', lm.step, workdir)
  caption = sample.describe(options, options.order or 'uniform', 0)
  outputs.write(lm.complete(texts, options), destination, len(texts) * options.num_samples, caption)
