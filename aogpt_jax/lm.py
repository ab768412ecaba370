"""A trained model with its tokenizer, in text: sample, infill, score."""

import dataclasses
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aogpt_jax import (
  config as config_lib,
  interop,
  keys,
  model as model_lib,
  objective,
  orders as orders_lib,
  sampling,
)
from aogpt_jax.config import Config, check
from aogpt_jax.data import tokenizers
from aogpt_jax.errors import UserError
from aogpt_jax.model import AOGPT
from aogpt_jax.training import checkpoints

_HOLE = re.compile(r'<mask(?::(\d+))?>')
_TOUCHED_HOLE = re.compile(r'\S<mask(?::\d+)?>|<mask(?::\d+)?>\S')


def parse_template(template: str, tokenizer: tokenizers.Tokenizer,
                   context_length: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokenizes a text with holes `<mask:k>`; what stands between two holes, by itself.

  Returns:
    Token ids (n,) int32 with zeros in the holes, and which are known (n,) bool.

  Raises:
    UserError: for a template without a hole, with a hole of 0 tokens, or longer than the context;
      for a hole without spaces around it where the tokenizer is one of ids.
  """
  pieces, known, end = [], [], 0
  for hole in [*_HOLE.finditer(template), None]:
    ids = tokenizer.encode(template[end:hole.start() if hole else len(template)])
    pieces.append(ids)
    known.append(np.ones(len(ids), bool))
    if hole:
      digits = hole[1] or '1'
      width = int(digits) if len(digits) < 10 else context_length + 1
      check(1 <= width <= context_length, 'template', hole[0][:40],
            f'a hole must have 1..{context_length} tokens, the context_length of this model')
      pieces.append(np.zeros(width, np.int32))
      known.append(np.zeros(width, bool))
      end = hole.end()
  tokens, known = np.concatenate(pieces).astype(np.int32), np.concatenate(known)
  check(not known.all(), 'template', template, 'has no hole; write <mask:k> for k tokens')
  check(not (tokenizer.spaced and _TOUCHED_HOLE.search(template)), 'template', template,
        'has no space between a hole and its neighbour; write "3 <mask:2> 5"')
  check(len(tokens) <= context_length, 'template', template,
        f'has {len(tokens)} tokens, more than the context_length={context_length} of this model')
  return tokens, known


def check_template(template: str, tokenizer: tokenizers.Tokenizer, config: Config,
                   ) -> tuple[np.ndarray, np.ndarray]:
  """`parse_template` for the model of `config`; UserError also if it cannot fill these holes."""
  tokens, known = parse_template(template, tokenizer, config.model.context_length)
  order = config.order.name
  check(config.model.knows_target or (order == 'left_to_right' and not known[known.sum():].any()),
        'template', template, f'this model knows the order {order} only; it can fill a hole if '
        'that is left_to_right and the hole is at the end')
  return tokens, known


@dataclasses.dataclass(frozen=True)
class Score:
  """Log-likelihood of a text: total nats of its tokens (negative log), and how many tokens."""

  nats: float
  num_tokens: int


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """What `aogpt_jax.load` returns; the model runs on one device."""

  model: AOGPT
  tokenizer: tokenizers.Tokenizer
  config: Config
  step: int

  def _order(self, name: str) -> orders_lib.OrderDistribution:
    """The distribution called `name`, with the run's options where it is the run's own."""
    own = self.config.order
    check(self.model.config.knows_target or name == own.name, 'order', name,
          f'this model is not told the next position, so it knows its own order only: {own.name}')
    return orders_lib.make(name, **(own.options() if name == own.name else {}))

  def _rule(self, temperature: float, top_p: float) -> sampling.SamplingRule:
    return sampling.SamplingRule(temperature, top_p, self.tokenizer.vocab_size)

  @property
  def generation_order(self) -> str:
    """Name of the orders that `sample` generates in."""
    name = self.config.order.name
    return 'uniform' if name == 'mixture' else name

  def sample(self, num_samples: int = 1, steps: int = 0, temperature: float = 1.0,
             top_p: float = 1.0, seed: int = 0) -> list[str]:
    """Draws texts of the full context length.

    Each text has its own uniformly random order; a run trained on one kind of order alone
    (left_to_right, fixed, blockwise) generates in that.

    Args:
      num_samples: texts.
      steps: forward passes a text; fewer than the context length reveal several tokens in one pass,
        independently of each other. 0: one a token.
      temperature: of every draw; 0 is greedy.
      top_p: nucleus of every draw; 1 keeps all tokens.
      seed: text i depends on (seed, i) alone.

    Raises:
      UserError: for an impossible option.
    """
    check(num_samples >= 1, 'num_samples', num_samples, 'must be at least 1')
    config_lib.check_seed('seed', seed)
    length = self.model.config.context_length
    order = self._order(self.generation_order).sample(
        keys.stream_key(seed, 'order'), num_samples, length)
    tokens = sampling.generate(self.model, keys.stream_key(seed, 'sample'), order, steps=steps,
                               rule=self._rule(temperature, top_p))
    return [self.tokenizer.decode(row) for row in np.asarray(tokens)]

  def infill(self, template: str, num_samples: int = 1, steps: int = 0, temperature: float = 1.0,
             top_p: float = 1.0, seed: int = 0) -> list[str]:
    """Fills the holes of a text given everything around them, in uniformly random order.

    A left-to-right GPT, which is not told the next position, can fill a hole at the end alone.

    Args:
      template: text with holes `<mask:k>` of k tokens (`<mask>`: 1). Text between holes is
        tokenized by itself and comes back unchanged.
      num_samples, steps, temperature, top_p, seed: as in `sample`; 0 steps: one a hole token.

    Returns:
      num_samples texts.

    Raises:
      UserError: for a template without a hole, one longer than the context, or a bad option.
    """
    check(num_samples >= 1, 'num_samples', num_samples, 'must be at least 1')
    config_lib.check_seed('seed', seed)
    tokens, known = check_template(template, self.tokenizer, self.config)
    length, num_known = len(tokens), int(known.sum())
    positions = np.arange(length)
    name = 'uniform' if self.config.model.knows_target else 'left_to_right'
    shuffled = orders_lib.make(name).sample(
        keys.stream_key(seed, 'order'), num_samples, length - num_known)
    order = jnp.concatenate([
        jnp.broadcast_to(positions[known], (num_samples, num_known)),
        jnp.asarray(positions[~known])[shuffled]], axis=1)
    filled = sampling.generate(
        self.model, keys.stream_key(seed, 'sample'), order, steps=steps,
        rule=self._rule(temperature, top_p), tokens=np.tile(tokens, (num_samples, 1)),
        prompt_length=num_known)
    return [self._decode_around(template, row) for row in np.asarray(filled)]

  def _decode_around(self, template: str, row: np.ndarray) -> str:
    """Decodes hole by hole, so that the known text is the template's own bytes."""
    text, at, end = [], 0, 0
    for hole in _HOLE.finditer(template):
      before = template[end:hole.start()]
      at += len(self.tokenizer.encode(before))
      width = int(hole.group(1) or 1)
      text += [before, self.tokenizer.decode(row[at:at + width])]
      at, end = at + width, hole.end()
    return ''.join(text) + template[end:]

  def score(self, texts: list[str], order: str = 'left_to_right', seed: int = 0) -> list[Score]:
    """Log-likelihood of texts along an order, without an end-of-text token.

    Args:
      texts: each 1 to context_length tokens.
      order: a name that `orders.make` knows; the run's own has the run's options.
      seed: of a random order; text i depends on (seed, i).

    Raises:
      UserError: for an empty or too long text or an unknown order.
    """
    check(not isinstance(texts, str), 'texts', texts, 'must be a list of texts, not one text')
    config_lib.check_seed('seed', seed)
    distribution = self._order(order)
    key, length = keys.stream_key(seed, 'eval'), self.model.config.context_length
    rows = []
    for i, text in enumerate(texts):
      ids = self.tokenizer.encode(text)
      check(1 <= len(ids) <= length, f'texts[{i}]', text[:40],
            f'has {len(ids)} tokens, must have 1..{length} (the context_length)')
      row = distribution.sample(key, 1, len(ids), first_row=i)[0]
      # The rest comes after the text in generation order, so the text's own terms do not see it.
      rest = np.arange(len(ids), length)
      rows.append((np.pad(ids, (0, len(rest))), np.concatenate([row, rest]), len(ids)))
    score = jax.jit(lambda params, *batch: objective.token_nll(
        nnx.merge(graphdef, params), *batch))
    graphdef, params = nnx.split(self.model)
    nll = [np.asarray(score(params, tokens[None], row[None].astype(np.int32)), np.float64)[0]
           for tokens, row, _ in rows]
    return [Score(float(x[:count].sum()), count) for x, (_, _, count) in zip(nll, rows)]


def load(path: str | pathlib.Path, ema: bool = True) -> LanguageModel:
  """Loads a run, or a PyTorch checkpoint of the reference, for a notebook or a job.

  Args:
    path: a run directory (its newest checkpoint), or one step of it: RUN/checkpoints/00001000; or
      a reference file x.pt, which has no tokenizer: its texts are ids, '3 17 4'.
    ema: the averaged weights, which the paper evaluates, or the raw ones.

  Raises:
    UserError: if there is no finished checkpoint there, or a file is damaged.
  """
  path = pathlib.Path(path).expanduser()
  if path.suffix == '.pt' and not path.is_dir():
    return _load_reference(path, ema)
  run, step = path, None
  if path.parent.name == 'checkpoints' and path.name.isdigit():
    run, step = path.parent.parent, int(path.name)
  if not (run / 'config.json').is_file():
    raise UserError(f'{path}: not a run directory: {run / "config.json"} does not exist')
  config = read_config(run)
  directory = run / 'checkpoints'
  steps = checkpoints.finished_steps(directory)
  if not steps:
    raise UserError(f'{directory}: no finished checkpoint yet')
  step = steps[-1] if step is None else step
  tokenizer = _load_tokenizer(config, run, checkpoints.read_manifest(directory, step))
  graphdef, abstract = nnx.split(
      nnx.eval_shape(lambda: model_lib.make(config.model, rngs=nnx.Rngs(0))))
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
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
