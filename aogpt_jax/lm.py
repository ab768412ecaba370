"""A trained model with its tokenizer, in text: sample, infill, score."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from aogpt_jax import (
  completion,
  config as config_lib,
  interop,
  keys,
  model as model_lib,
  orders as orders_lib,
  scoring,
  templates,
)
from aogpt_jax.completion import Completion
from aogpt_jax.config import Config, SampleConfig, check
from aogpt_jax.data import tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT
from aogpt_jax.scoring import Score
from aogpt_jax.training import checkpoints


def check_template(text: str, tokenizer: tokenizers.Tokenizer, config: Config,
                   ) -> templates.Template:
  """`templates.parse` for the model of `config`; UserError also if it cannot fill these holes."""
  template = templates.parse(text, tokenizer, config.model.context_length)
  order, known = config.order.name, template.known
  check(config.model.knows_target or (order == 'left_to_right' and not known[known.sum():].any()),
        'template', text, f'this model knows the order {order} only; it can fill a hole if '
        'that is left_to_right and the hole is at the end')
  return template


def _options(**fields: Any) -> SampleConfig:
  """SampleConfig from keyword arguments; UserError for a name that it does not have."""
  return config_lib.from_dict(fields, SampleConfig, 'sample.')


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """What `aogpt_jax.load` returns; the model runs on one device."""

  model: AOGPT
  tokenizer: tokenizers.Tokenizer
  config: Config
  step: int

  def order(self, name: str) -> orders_lib.OrderDistribution:
    """The distribution called `name`, with the run's options where it is the run's own."""
    own = self.config.order
    check(self.model.config.knows_target or name == own.name, 'order', name,
          f'this model is not told the next position, so it knows its own order only: {own.name}')
    return orders_lib.make(name, **(own.options() if name == own.name else {}))

  @property
  def generation_order(self) -> str:
    """Name of the orders that `sample` generates in."""
    name = self.config.order.name
    return 'uniform' if name == 'mixture' else name

  def complete(self, texts: Sequence[str], options: SampleConfig) -> Iterator[Completion]:
    """Fills templates (see `aogpt_jax.templates`), options.num_samples times each.

    Args:
      texts: templates; rows may differ in known text, holes and length.
      options: of sampling; order '' is uniform, or the order of a model that knows one alone.

    Returns:
      An iterator of Completions, template by template. Row i depends on (seed, i) alone.

    Raises:
      UserError: for a bad template or option.
    """
    parsed = [check_template(text, self.tokenizer, self.config) for text in texts]
    default = 'uniform' if self.config.model.knows_target else self.config.order.name
    rows = completion.make_rows(parsed, options.num_samples, self.order(options.order or default),
                                options.seed)
    return completion.complete(self.model, self.tokenizer, rows, options)

  def sample(self, num_samples: int = 1, **options: Any) -> list[str]:
    """Draws texts of the full context length.

    Each text has its own uniformly random order; a run trained on one kind of order alone
    (left_to_right, fixed, blockwise) generates in that.

    Args:
      num_samples: texts; text i depends on (seed, i) alone.
      **options: fields of `SampleConfig`: steps (0: one token each), temperature, top_p, top_k,
        min_p, schedule, sampler, order, seed, …

    Raises:
      UserError: for an impossible option.
    """
    check(num_samples >= 1, 'num_samples', num_samples, 'must be at least 1')
    options = _options(num_samples=num_samples, **options)
    return [c.text for c in self.sample_completions(options)]

  def sample_completions(self, options: SampleConfig) -> Iterator[Completion]:
    """As `sample`, with all that is known of each text."""
    length = self.model.config.context_length
    check(options.steps <= length, 'steps', options.steps, f'must be in 1..{length}')
    whole = templates.Template((length,), np.zeros(length, np.int32), np.zeros(length, bool))
    order = self.order(options.order or self.generation_order)
    rows = completion.make_rows([whole], options.num_samples, order, options.seed)
    return completion.complete(self.model, self.tokenizer, rows, options)

  def infill(self, template: str | Sequence[str], num_samples: int = 1, **options: Any,
             ) -> list[str]:
    r"""Fills the holes of texts given everything around them, in uniformly random order.

    A left-to-right GPT, which is not told the next position, can fill a hole at the end alone.

    Args:
      template: text with holes `<mask:k>` of k tokens (`<mask>`: 1; `\<mask>` is literal text), or
        several such texts. Known text is tokenized piece by piece and comes back unchanged; a
        text without holes comes back whole.
      num_samples: texts of each template.
      **options: as in `sample`; more steps than hole tokens are one token each.

    Returns:
      num_samples texts of each template, template by template.

    Raises:
      UserError: for a hole of 0 tokens, a text that is empty or longer than the context, or a bad
        option.
    """
    check(num_samples >= 1, 'num_samples', num_samples, 'must be at least 1')
    texts = [template] if isinstance(template, str) else list(template)
    return [c.text for c in self.complete(texts, _options(num_samples=num_samples, **options))]

  def continue_text(self, text: str, num_tokens: int, num_samples: int = 1, **options: Any,
                    ) -> list[str]:
    """Continues a text by `num_tokens` tokens: the case of a hole at the end.

    Args:
      text: the beginning, literally; `<mask>` in it is no hole.
      num_tokens: at least 1; text and continuation must fit the context.
      num_samples, **options: as in `infill`.
    """
    # A backslash at the end would escape the hole.
    literal = templates.escape(text) + '\\' * (len(text) - len(text.rstrip('\\')))
    gap = ' ' if self.tokenizer.spaced and text and not text[-1].isspace() else ''
    return self.infill(f'{literal}{gap}<mask:{num_tokens}>', num_samples, **options)

  def score(self, texts: Sequence[str | scoring.Request], order: str = 'left_to_right',
            seed: int = 0, batch_size: int = 32) -> list[Score]:
    """Log-likelihood of texts, or of spans of them given the rest, without an end-of-text token.

    Args:
      texts: each 1 to context_length tokens; a `scoring.Request` names spans and what they are
        given.
      order: of the tokens of a text or span; a name that `orders.make` knows; the run's own has the
        run's options.
      seed: of a random order; text i depends on (seed, i).
      batch_size: texts scored at once.

    Raises:
      UserError: for an empty or too long text, spans that cannot be, or an unknown order.
    """
    check(not isinstance(texts, str), 'texts', texts, 'must be a list of texts, not one text')
    config_lib.check_seed('seed', seed)
    distribution, key = self.order(order), keys.stream_key(seed, 'eval')
    rows = []
    for i, text in enumerate(texts):
      request = text if isinstance(text, scoring.Request) else scoring.Request(text)
      try:
        row = scoring.make_row(request, self.tokenizer, self.model.config.context_length,
                               distribution, key, i)
        self._check_known_order(row, distribution)
      except UserError as error:
        raise UserError(f'text {i + 1}: {error}') from None
      rows.append(row)
    return list(scoring.score(self.model, rows, batch_size))

  def _check_known_order(self, row: scoring.Row, own: orders_lib.OrderDistribution) -> None:
    """UserError if a model that knows one order alone would read the row in another."""
    if self.model.config.knows_target:
      return
    used = row.given + sum(row.span_tokens)
    expected = np.asarray(own.sample(jax.random.key(0), 1, len(row.order))[0])
    check(np.array_equal(row.order[:used], expected[:used]), 'spans', row.order[:used].tolist(),
          f'this model is not told the next position, so it knows the order {own.name} only, from '
          'its first token on')


def load(path: str | pathlib.Path, ema: bool = True, tokenizer: str = '') -> LanguageModel:
  """Loads a run, or a PyTorch checkpoint of the reference, for a notebook or a job.

  Args:
    path: a run directory (its newest checkpoint), or one step of it: RUN/checkpoints/00001000; or
      a reference file x.pt, which has no tokenizer: its texts are ids, '3 17 4'.
    ema: the averaged weights, which the paper evaluates, or the raw ones.
    tokenizer: of a model that came without one, as in the config's data.tokenizer: 'gpt2', …

  Raises:
    UserError: if there is no finished checkpoint there, a file is damaged, or the tokenizer is not
      needed, cannot be had or has more ids than the model.
  """
  path = pathlib.Path(path).expanduser()
  if path.suffix == '.pt' and not path.is_dir():
    lm = _load_reference(path, ema)
  else:
    lm = _load_run(path, ema)
  if not tokenizer:
    return lm
  if not isinstance(lm.tokenizer, tokenizers.IdsTokenizer):
    raise UserError(f'tokenizer={tokenizer!r}: {path} has its own; leave it out')
  return dataclasses.replace(
      lm, tokenizer=tokenizers.make_for_vocabulary(tokenizer, lm.config.model.vocab_size))


def _load_run(path: pathlib.Path, ema: bool) -> LanguageModel:
  run, step = path, None
  if path.parent.name == 'checkpoints' and path.name.isdigit():
    run, step = path.parent.parent, int(path.name)
  if not (run / 'config.json').is_file():
    raise UserError(f'{path}: not a run directory: {run / "config.json"} does not exist')
  config = read_config(run)
  directory = run / 'checkpoints'
  steps = checkpoints.saved_steps(directory)
  if not steps:
    raise UserError(f'{directory}: no finished checkpoint yet')
  step = steps[-1] if step is None else step
  tokenizer = _load_tokenizer(config, run, checkpoints.read_manifest(directory, step))
  graphdef, abstract = nnx.split(
      nnx.eval_shape(lambda: model_lib.make(config.model, rngs=nnx.Rngs(0))))
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device),
                          nnx.to_pure_dict(abstract))
  params = checkpoints.restore_params(directory, step, abstract, ema)
  return LanguageModel(nnx.merge(graphdef, params), tokenizer, config, step)


def _load_reference(path: pathlib.Path, ema: bool) -> LanguageModel:
  reference = interop.read_reference(path)
  tokenizer = tokenizers.IdsTokenizer(reference.config.model.vocab_size)
  return LanguageModel(reference.model(ema), tokenizer, reference.config, reference.step)


def _load_tokenizer(config: Config, run: pathlib.Path, manifest: dict[str, Any],
                    ) -> tokenizers.Tokenizer:
  """The tokenizer of a run, checked to be the one that the manifest of its checkpoint names."""
  path = run / 'tokenizer.model'
  if config.data.tokenizer == 'ids':
    path, tokenizer = run / 'config.json', tokenizers.IdsTokenizer(config.model.vocab_size)
  else:
    tokenizer = tokenizers.load_tokenizer(path)
  expected = manifest.get('tokenizer_fingerprint')
  if tokenizer.fingerprint != expected:
    raise UserError(f'{path}: is not the tokenizer that this run was trained with '
                    f'(sha256 {tokenizer.fingerprint}, expected {expected}); restore the file')
  return tokenizer


def read_config(run: pathlib.Path) -> Config:
  """Reads the resolved config of a run directory; UserError if it is damaged."""
  path = run / 'config.json'
  try:
    return config_lib.from_json(path.read_text())
  except (OSError, ValueError) as error:
    raise UserError(f'{path}: cannot be read as the config of a run: {error}') from None
