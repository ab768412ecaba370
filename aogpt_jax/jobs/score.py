"""--mode=score: log-likelihoods of texts, or of spans of them given the rest."""

import json
import logging
import pathlib

from aogpt_jax import lm as lm_lib, scoring
from aogpt_jax.config import Config
from aogpt_jax.errors import UserError
from aogpt_jax.jobs import inputs, outputs

log = logging.getLogger(__name__)


def run(config: Config, source: pathlib.Path, output: str, text: str | None, path: str | None,
        order: str, tokenizer: str = '') -> None:
  """Scores every text; writes one JSON line each, or a sentence for --text.

  Args:
    config: its eval section and seed are used.
    source: a run directory, one step of it, or a reference file x.pt.
    output: file of JSON lines, '-' for stdout; '' is a sentence for one --text, else stdout.
    text, path: --text or --input; a line is a text, or {"text": …, "spans": …, "given": …}.
    order: of the tokens of a text or span.
    tokenizer: of a source that has none, see `lm.load`.

  Raises:
    UserError: for a bad input, a text that does not fit the model, or an unknown order.
  """
  records = inputs.read(text, path, 'score', 'a text', objects=True)
  where = '--text' if path is None else f'--input={path}'
  requests = []
  for number, record in enumerate(records, start=1):
    try:
      requests.append(scoring.parse_request(record))
    except UserError as error:
      raise UserError(f'{where}: text {number}: {error}') from None
  lm = lm_lib.load(source, config.eval.ema, tokenizer)
  log.info('step %d of %s', lm.step, source)
  try:
    scores = lm.score(requests, order, config.seed, config.eval.batch_size)
  except UserError as error:
    raise UserError(f'{where}: {error}') from None
  if not output and path is None:
    print(f'{scores[0].nats:.4f} nats, {scores[0].num_tokens} tokens, '
          f'{scores[0].nats / scores[0].num_tokens:.4f} nats/token')
    return
  lines = [json.dumps(scoring.as_json(*both), ensure_ascii=False)
           for both in zip(requests, scores)]
  outputs.write_lines(lines, output or '-')
