"""The whole configuration on one page: frozen typed dataclasses, validated when made.

A config file (`configs/*.py`) returns `default()`, a locked `ml_collections.ConfigDict` with every
field below, after stating its differences. `from_dict` turns it, with the `--config.a.b=c`
overrides, into a `Config`. Nothing here imports jax: `--help` and a wrong key answer at once.
"""

import dataclasses
import json
import math
import typing
from typing import Any

import ml_collections

from aogpt_jax.errors import UserError, nearest

POSITION_ENCODINGS = {'decoder': ('learned', 'target_rotary'), 'encoder': ('learned', 'rotary')}
INJECTIONS = ('adaln', 'input', 'every_block', 'every_block_distinct', 'none')
NORMS = ('rmsnorm', 'layernorm')
INITIALIZERS = ('truncated_normal', 'normal')
MASKINGS = ('linear', 'cosine', 'count')
SAMPLERS = ('parallel', 'sequential', 'speculative', 'adaptive')
SCHEDULES = ('linear', 'cosine')
POLICIES = ('confidence', 'entropy', 'margin')
ATTENTIONS = ('auto', 'dense', 'blocked', 'cudnn', 'splash')
# Of every layer is kept for the backward pass: all; the outputs of its linear layers (attention
# itself is computed again); or its input alone.
REMAT = ('none', 'dots', 'full')
DTYPES = ('float32', 'bfloat16')
ORDERS = ('left_to_right', 'uniform', 'mixture', 'fixed', 'blockwise')
INNER_ORDERS = ('fixed', 'random')


def check(ok: bool, field: str, value: Any, rule: str) -> None:
  """Raises UserError 'FIELD=VALUE: RULE' unless `ok`."""
  if not ok:
    raise UserError(f'{field}={value!r}: {rule}')


def check_choice(field: str, value: str, valid: tuple[str, ...]) -> None:
  """Raises UserError that names the nearest valid value unless `value` is in `valid`."""
  check(value in valid, field, value, f'not one of {valid}{nearest(value, valid)}')


def check_seed(field: str, value: int) -> None:
  """Raises UserError unless 0 <= value < 2**32, what every library here takes."""
  check(type(value) is int and 0 <= value < 2**32, field, value, 'must be an integer in [0, 2**32)')


def _check_at_least(config: Any, section: str, low: float, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    check(value >= low, f'{section}.{name}', value, f'must be at least {low}')


def _check_within(config: Any, section: str, low: float, high: float, *names: str) -> None:
  """Checks low <= value < high."""
  for name in names:
    value = getattr(config, name)
    check(low <= value < high, f'{section}.{name}', value, f'must be in [{low}, {high})')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of the model (paper section 2, Table 4: the defaults are AO-GPT small)."""

  architecture: str = 'decoder'  # or encoder: the masked diffusion baseline, full attention
  vocab_size: int = 50304  # ids the model knows; at least the tokenizer's, often padded to 64
  context_length: int = 1024  # n, the longest sequence in tokens
  num_layers: int = 12
  num_heads: int = 12
  embed_dim: int = 768  # d, width of the residual stream; the MLP is 4d wide
  target_injection: str = 'adaln'  # where the target position enters (paper Figure 5), see Block
  condition_dim: int = 128  # adaln: width of the target table; the other injections use d
  position_encoding: str = 'learned'  # or target_rotary: queries rotate by target, keys by position
  rotary_base: float = 10000.0  # used by target_rotary, and by rotary of an encoder
  norm: str = 'rmsnorm'  # or layernorm, which has biases if use_bias
  qk_norm: bool = True  # norm of queries and keys, of the same kind
  use_bias: bool = False  # of qkv, attention projection, MLP, layernorm; AdaLN always has its own
  head_bias: bool = True
  tie_embeddings: bool = False  # the head is the token embedding, without bias
  dropout_rate: float = 0.0
  initializer: str = 'truncated_normal'  # cut at 3 std; or normal
  init_std: float = 0.02  # of the initialiser; 0.02 * sqrt(768 / d) suits small widths
  gate_init: float = 0.0  # initial bias of the AdaLN gates; 0 as the reference, 1 starts faster
  dtype: str = 'float32'  # of matmul inputs; weights, norms, softmax and loss stay float32
  attention: str = 'auto'  # by platform and length, or dense, blocked, cudnn, splash
  remat: str = 'none'  # what the backward pass computes again: see REMAT
  scan_layers: bool = True  # one compiled layer run in a loop, or all layers unrolled
  loss_chunk: int = 0  # generation steps whose logits exist at once in the loss; 0: all of them

  def __post_init__(self):
    _check_at_least(self, 'model', 1, 'vocab_size', 'context_length', 'num_layers', 'num_heads')
    _check_at_least(self, 'model', 1, 'embed_dim', 'condition_dim')
    _check_at_least(self, 'model', 0, 'loss_chunk')
    _check_within(self, 'model', 0, 1, 'dropout_rate')
    check_choice('model.architecture', self.architecture, tuple(POSITION_ENCODINGS))
    check_choice('model.target_injection', self.target_injection, INJECTIONS)
    check_choice('model.norm', self.norm, NORMS)
    check_choice('model.initializer', self.initializer, INITIALIZERS)
    check_choice('model.attention', self.attention, ATTENTIONS)
    check_choice('model.remat', self.remat, REMAT)
    check_choice('model.dtype', self.dtype, DTYPES)
    check(self.init_std > 0, 'model.init_std', self.init_std, 'must be positive')
    check(self.rotary_base > 1, 'model.rotary_base', self.rotary_base, 'must be above 1')
    check(not (self.tie_embeddings and self.head_bias), 'model.head_bias', self.head_bias,
          'must be False with model.tie_embeddings=True: a tied head has no bias')
    self._check_positions()
    if self.embed_dim % self.num_heads:
      near = (self.num_heads + sign * i for i in range(self.num_heads) for sign in (-1, 1))
      best = next(h for h in near if self.embed_dim % h == 0)  # 1 at the latest
      check(False, 'model.num_heads', self.num_heads,
            f'must divide model.embed_dim={self.embed_dim}; the nearest that does is {best}')
    if self.position_encoding != 'learned':
      check(self.head_dim % 2 == 0, 'model.num_heads', self.num_heads,
            f'{self.position_encoding} needs an even head width, but '
            f'embed_dim/num_heads={self.head_dim}')

  def _check_positions(self):
    encodings = POSITION_ENCODINGS[self.architecture]
    check(self.position_encoding in encodings, 'model.position_encoding', self.position_encoding,
          f'not one of {encodings}, those of architecture={self.architecture!r}'
          f'{nearest(self.position_encoding, encodings)}')
    if self.architecture == 'encoder':
      check(self.target_injection == 'none', 'model.target_injection', self.target_injection,
            "must be 'none' with model.architecture='encoder': every item is its own target")

  @property
  def head_dim(self) -> int:
    return self.embed_dim // self.num_heads

  @property
  def knows_target(self) -> bool:
    """Whether the model is told which position comes next, as orders that vary need."""
    return (self.architecture == 'encoder' or self.target_injection != 'none'
            or self.position_encoding == 'target_rotary')


@dataclasses.dataclass(frozen=True)
class OrderConfig:
  """Distribution over generation orders in training; see `aogpt_jax.orders.make`."""

  name: str = 'mixture'
  random_ratio: float = 0.9  # mixture: probability of a uniform order, else left to right
  seed: int = 0  # fixed, and blockwise with inner=fixed: draws the permutation
  permutation: tuple[int, ...] = ()  # fixed: the order itself; blockwise: the inner order
  block_size: int = 4  # blockwise: blocks of this many tokens, left to right
  inner: str = 'fixed'  # blockwise: one inner permutation for all, or a random one a block

  def __post_init__(self):
    check_choice('order.name', self.name, ORDERS)
    check_choice('order.inner', self.inner, INNER_ORDERS)
    check(0 <= self.random_ratio <= 1, 'order.random_ratio', self.random_ratio, 'must be in [0, 1]')
    check_seed('order.seed', self.seed)
    _check_at_least(self, 'order', 1, 'block_size')

  @property
  def varies(self) -> bool:
    """Whether two rows can have different orders."""
    return (self.name in ('uniform', 'mixture')
            or (self.name == 'blockwise' and self.inner == 'random'))

  def options(self) -> dict[str, Any]:
    """The keyword arguments of `orders.make` that this distribution reads."""
    names = {
        'mixture': ('random_ratio',),
        'fixed': ('seed', 'permutation'),
        'blockwise': ('block_size', 'inner', 'seed', 'permutation'),
    }.get(self.name, ())
    return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class DiffusionConfig:
  """Loss of an encoder: how masks are drawn; see `aogpt_jax.masks`."""

  masking: str = 'linear'  # ratio t (the λ-denoising form), 'cosine' in t, or 'count': exact counts

  def __post_init__(self):
    check_choice('diffusion.masking', self.masking, MASKINGS)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """What is read, and with which tokenizer.

  A corpus is `embedded:NAME[:SPLIT]`, `files:GLOB`, `tfds:NAME` or `tfds:DIRECTORY`, `hf:NAME` or
  `hf:DIRECTORY`, or a recipe (openwebtext, lm1b, wikitext2, wikitext103, ptb, lambada), with
  options behind a '#': `hf:Salesforce/wikitext/wikitext-2-raw-v1#split=test,detokenize=wikitext`.
  See `aogpt_jax.data.corpora`. A tokenizer is sentencepiece (trained on data.train), gpt2 (from
  the cache of tiktoken), gpt2:DIRECTORY (vocab.bpe and encoder.json), bytes, or the path of a
  saved one, such as another run's tokenizer.model; a converted checkpoint has ids.
  """

  train: str = 'embedded:shakespeare:train'
  validation: str = 'embedded:shakespeare:validation'
  tokenizer: str = 'sentencepiece'  # or gpt2, gpt2:DIRECTORY, bytes, a path
  vocab_size: int = 512  # of the tokenizer, when it is trained here
  directory: str = ''  # where packed blocks are written; empty: WORKDIR/data
  workers: int = 0  # processes that tokenize a corpus of more than a few MB; 0: one a core

  def __post_init__(self):
    _check_at_least(self, 'data', 0, 'workers')
    _check_at_least(self, 'data', 1, 'vocab_size')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, schedule and weight average (paper section 3)."""

  learning_rate: float = 6e-4
  min_learning_rate: float = 6e-5
  warmup_steps: int = 2000  # linear from 0
  decay_steps: int = 0  # the cosine ends at this step; 0: at train.num_steps
  weight_decay: float = 0.05  # on kernels and embeddings, not on biases and norm scales
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  clip_norm: float = 1.0  # global gradient norm; 0: no clipping
  ema_decay: float = 0.9999  # effective min(ema_decay, (1+k)/(10+k)) at update k; 0: no average

  def __post_init__(self):
    _check_at_least(self, 'optimizer', 0, 'learning_rate', 'min_learning_rate', 'warmup_steps',
                    'decay_steps', 'weight_decay', 'clip_norm')
    _check_within(self, 'optimizer', 0, 1, 'b1', 'b2', 'ema_decay')
    check(self.eps > 0, 'optimizer.eps', self.eps, 'must be positive')


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Length and batch of the run."""

  num_steps: int = 500_000
  batch_size: int = 512  # sequences in one update, over all devices and micro-batches
  accumulation: int = 1  # micro-batches in one update
  log_every: int = 10
  eval_every: int = 1000  # 0: only at the end
  checkpoint_every: int = 1000  # 0: only at the end
  keep_checkpoints: int = 2
  compilation_cache: str = ''  # empty: WORKDIR/compilation_cache; or a directory, or 'off'
  wandb_project: str = ''  # empty: no Weights & Biases

  def __post_init__(self):
    _check_at_least(self, 'train', 1, 'num_steps', 'batch_size', 'accumulation', 'log_every',
                    'keep_checkpoints')
    _check_at_least(self, 'train', 0, 'eval_every', 'checkpoint_every')
    check(self.batch_size % self.accumulation == 0, 'train.accumulation', self.accumulation,
          f'must divide train.batch_size={self.batch_size}')


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Validation and --mode=evaluate: every block once an order, `num_orders` times if it varies."""

  num_orders: int = 4  # orders drawn a block; the standard error over orders needs 2
  batch_size: int = 64
  ema: bool = True  # --mode=evaluate, score: the averaged weights, or the raw ones
  prefix_blocks: int = 64  # blocks that an encoder scores left to right, n passes each; 0: all
  # Ensembles over context orders (paper eq. 7), in --mode=evaluate.
  num_ensembles: int = 0  # sizes 1, 2, 4, … up to this; 0: none
  ensemble_steps: int = 0  # generation steps scored in a block, drawn at random; 0: all, exactly
  ensemble_blocks: int = 0  # blocks, evenly spaced; 0: all
  # Quality of generated texts, in --mode=evaluate --judge=…: the paper's grid (Table 2).
  generation_steps: tuple[int, ...] = (64, 128, 256, 512, 1024)  # those up to the context length
  top_ps: tuple[float, ...] = (1.0, 0.95, 0.95)  # with the temperature at the same place
  temperatures: tuple[float, ...] = (1.0, 0.9, 0.7)

  def __post_init__(self):
    _check_at_least(self, 'eval', 0, 'prefix_blocks', 'num_ensembles', 'ensemble_steps',
                    'ensemble_blocks')
    _check_at_least(self, 'eval', 1, 'batch_size')
    _check_at_least(self, 'eval', 2, 'num_orders')
    check(self.ensemble_steps != 1, 'eval.ensemble_steps', 1,
          'must be at least 2, which a standard error needs, or 0 for all')
    for name in ('generation_steps', 'top_ps', 'temperatures'):
      values = getattr(self, name)
      high = {'top_ps': 1}.get(name, math.inf)
      low = {'generation_steps': 1}.get(name, 0)
      check(values and all(low <= v <= high for v in values), f'eval.{name}', values,
            f'must hold values in [{low}, {high}]')
    check(len(self.top_ps) == len(self.temperatures), 'eval.temperatures', self.temperatures,
          f'must have one entry for each of eval.top_ps={self.top_ps}')


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """Texts drawn by --mode=sample and at the end of training."""

  num_samples: int = 3
  sampler: str = 'parallel'  # or sequential, speculative (lossless), adaptive; see aogpt_jax.lm
  steps: int = 0  # parallel: forward passes a text; 0: one a token
  schedule: str = 'linear'  # parallel: how many tokens each step reveals; or cosine
  order: str = ''  # of the tokens to fill; empty: uniform, or the one order that a run knows
  temperature: float = 1.0  # 0: greedy
  final_temperature: float = -1.0  # reached linearly at the last step; -1: constant
  top_k: int = 0  # 0: all
  top_p: float = 1.0
  min_p: float = 0.0  # least share of the most probable token
  window: int = 4  # speculative: tokens drafted at once
  policy: str = 'confidence'  # adaptive: position that is filled next; or entropy, margin
  candidates: int = 0  # adaptive: random positions scored at each step; 0: all that remain
  batch_size: int = 32  # texts generated at once; changes no text
  seed: int = 0
  infill: str = ''  # a text with holes <mask:k> of k tokens, filled at the end of training

  def __post_init__(self):
    _check_at_least(self, 'sample', 0, 'num_samples', 'steps', 'top_k', 'candidates')
    _check_at_least(self, 'sample', 1, 'window', 'batch_size')
    check_choice('sample.sampler', self.sampler, SAMPLERS)
    check_choice('sample.schedule', self.schedule, SCHEDULES)
    check_choice('sample.order', self.order, ('', *ORDERS))
    check_choice('sample.policy', self.policy, POLICIES)
    check(0 <= self.temperature < float('inf'), 'sample.temperature', self.temperature,
          'must be finite and at least 0 (greedy)')
    final = self.final_temperature
    check(0 <= final < float('inf') or final == -1, 'sample.final_temperature', final,
          'must be finite and at least 0 (greedy), or -1 (constant)')
    check(final == -1 or self.sampler == 'parallel', 'sample.final_temperature', final,
          f'must be -1 with sample.sampler={self.sampler!r}: only parallel steps are annealed')
    check_seed('sample.seed', self.seed)
    check(0 <= self.top_p <= 1, 'sample.top_p', self.top_p, 'must be in [0, 1]')
    check(0 <= self.min_p <= 1, 'sample.min_p', self.min_p, 'must be in [0, 1]')


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each mesh axis; -1 in one place takes all that is left."""

  data: int = -1
  fsdp: int = 1
  tensor: int = 1

  def __post_init__(self):
    sizes = dataclasses.astuple(self)
    for name, size in zip(('data', 'fsdp', 'tensor'), sizes):
      check(size >= 1 or size == -1, f'mesh.{name}', size, 'must be positive, or -1 for the rest')
    check(sizes.count(-1) <= 1, 'mesh', sizes, 'at most one axis may be -1')


@dataclasses.dataclass(frozen=True)
class Config:
  """One run. Two runs with equal configs on any number of devices give the same numbers."""

  seed: int = 0
  model: ModelConfig = ModelConfig()
  order: OrderConfig = OrderConfig()
  diffusion: DiffusionConfig = DiffusionConfig()
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  train: TrainConfig = TrainConfig()
  eval: EvalConfig = EvalConfig()
  sample: SampleConfig = SampleConfig()
  mesh: MeshConfig = MeshConfig()

  def __post_init__(self):
    check_seed('seed', self.seed)
    check(self.sample.steps <= self.model.context_length, 'sample.steps', self.sample.steps,
          f'must be at most model.context_length={self.model.context_length}')
    order = self.order
    if self.model.architecture == 'encoder':
      check(order.name == 'uniform', 'order.name', order.name,
            "must be 'uniform' with model.architecture='encoder': its loss is the masked-diffusion "
            'bound, an average over all orders')
    if not self.model.knows_target:
      check(not order.varies, 'order.name', order.name,
            f'{"with order.inner=random " if order.name == "blockwise" else ""}varies from row to '
            'row, but model.target_injection=\'none\' does not tell the model the next position; '
            'choose left_to_right, or another target_injection')
    if order.name == 'blockwise':
      check(self.model.context_length % order.block_size == 0, 'order.block_size',
            order.block_size, f'must divide model.context_length={self.model.context_length}')
    if order.permutation:
      length = order.block_size if order.name == 'blockwise' else self.model.context_length
      check(sorted(order.permutation) == list(range(length)), 'order.permutation',
            order.permutation, f'must hold each of 0..{length - 1} once')

  @property
  def decay_steps(self) -> int:
    """The step at which the cosine ends."""
    return self.optimizer.decay_steps or self.train.num_steps


# Fields that may change when a run is continued: they do not touch the weights that come out.
FREE_FIELDS = ('train.num_steps', 'train.log_every', 'train.eval_every', 'train.checkpoint_every',
               'train.keep_checkpoints', 'train.wandb_project', 'train.compilation_cache', 'eval.',
               'sample.', 'mesh.', 'data.directory', 'data.workers', 'data.validation',
               'model.scan_layers', 'model.loss_chunk', 'model.attention', 'model.remat')


def default() -> ml_collections.ConfigDict:
  """Every field with its default, locked: what a config file changes and returns."""
  return ml_collections.ConfigDict(dataclasses.asdict(Config())).lock()


def paper() -> ml_collections.ConfigDict:
  """As `default`, AO-GPT small, with what all runs of the paper share: data, precision, memory."""
  config = default()
  config.model.dtype = 'bfloat16'
  config.model.loss_chunk = 128
  config.model.remat = 'dots'
  # OpenWebText has one split; 100,000 documents are held out, as is usual.
  config.data.train = 'openwebtext#split=train[:-100000]'
  config.data.validation = 'openwebtext#split=train[-100000:]'
  config.data.tokenizer = 'gpt2'
  config.train.accumulation = 8
  return config


def from_dict(values: Any, kind: type = Config, prefix: str = '') -> Any:
  """Builds `kind` (Config or one of its sections) from a nested dict or ConfigDict.

  Raises UserError for an unknown key (the nearest valid one is named), a value of the wrong type,
  or an impossible value. Keys that are left out take their defaults.
  """
  fields = {field.name: field for field in dataclasses.fields(kind)}
  kwargs = {}
  for key, value in dict(values).items():
    name = prefix + key
    if key not in fields:
      raise UserError(f'{name}: no such config field{nearest(key, fields)}')
    expected = fields[key].type
    if dataclasses.is_dataclass(expected):
      value = from_dict(value, expected, name + '.')
    elif expected in (tuple[int, ...], tuple[float, ...]):
      kind_of_item = typing.get_args(expected)[0]
      value = tuple(float(v) if kind_of_item is float and type(v) is int else v for v in value)
      check(all(type(v) is kind_of_item and math.isfinite(v) for v in value), name, value,
            f'must hold values of type {kind_of_item.__name__}')
    else:
      if expected is float and type(value) is int:
        value = float(value)
      check(type(value) is expected, name, value, f'must be of type {expected.__name__}')
      check(expected is not float or math.isfinite(value), name, value, 'must be finite')
    kwargs[key] = value
  return kind(**kwargs)


def flatten(config: Config) -> dict[str, Any]:
  """{'seed': 0, 'model.num_layers': 12, ...}."""
  flat = {}
  for key, value in dataclasses.asdict(config).items():
    if isinstance(value, dict):
      flat.update({f'{key}.{name}': v for name, v in value.items()})
    else:
      flat[key] = value
  return flat


def differing_fields(old: Config, new: Config) -> list[str]:
  """Names the fields that forbid continuing run `old` under `new`, as 'field: OLD -> NEW'."""
  flats = [flatten(old), flatten(new)]
  for flat, config in zip(flats, (old, new)):
    flat['optimizer.decay_steps'] = config.decay_steps
  names = [name for name in flats[0]
           if flats[0][name] != flats[1][name] and not name.startswith(FREE_FIELDS)]
  texts = {name: f'{name}: {flats[0][name]!r} -> {flats[1][name]!r}' for name in names}
  if old.optimizer.decay_steps == new.optimizer.decay_steps and 'optimizer.decay_steps' in texts:
    texts['optimizer.decay_steps'] = (
        f'train.num_steps: {old.train.num_steps} -> {new.train.num_steps}, which moves the end of '
        f'the cosine (add --config.optimizer.decay_steps={old.decay_steps} to keep it)')
  return list(texts.values())


def to_json(config: Config) -> str:
  """Indented JSON; `from_json` reads it back to an equal Config."""
  return json.dumps(dataclasses.asdict(config), indent=2) + '\n'


def from_json(text: str) -> Config:
  """Reads what `to_json` wrote; raises UserError as `from_dict` does."""
  values = json.loads(text)
  check(isinstance(values, dict), 'config', values, 'must be a JSON object')
  return from_dict(values)
