"""One update: tokens and orders (or masks) → NLL → gradient → new state, as pure functions."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from aogpt_jax import (
  keys,
  masks,
  model as model_lib,
  objective,
  orders as orders_lib,
  sharding as sharding_lib,
)
from aogpt_jax.config import Config
from aogpt_jax.training import optimizer as optimizer_lib


class TrainState(NamedTuple):
  """All that a run carries from step to step, and all that a checkpoint holds.

  step: () int32, updates done. params, ema: nested dicts of float32 arrays. opt_state: optax's.
  """

  step: jax.Array
  params: Any
  ema: Any
  opt_state: Any


class Recipe(NamedTuple):
  """The static half of training: everything that is not an array."""

  config: Config
  graphdef: nnx.GraphDef
  optimizer: optax.GradientTransformation
  order: orders_lib.OrderDistribution


def make_recipe(config: Config) -> Recipe:
  """Builds model structure, optimiser and order distribution from the config; no arrays."""
  abstract = nnx.eval_shape(lambda: model_lib.make(config.model, rngs=nnx.Rngs(0)))
  return Recipe(config, nnx.graphdef(abstract), optimizer_lib.make_optimizer(config),
                orders_lib.make(config.order.name, **config.order.options()))


def init_state(recipe: Recipe) -> TrainState:
  """The state before the first update; a function of config.seed, to be run under jit."""
  key = keys.stream_key(recipe.config.seed, 'init')
  model = model_lib.make(recipe.config.model, rngs=nnx.Rngs(key))
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return TrainState(jnp.int32(0), params, jax.tree.map(jnp.copy, params),
                    recipe.optimizer.init(params))


def accumulate(recipe: Recipe, params: Any, tokens: jax.Array, draws: jax.Array | masks.Masks,
               key: jax.Array) -> tuple[jax.Array, Any]:
  """Loss and gradient of the mean over all tokens, one micro-batch at a time.

  Micro-batches add up sums of NLL and their gradients; one division by the number of tokens
  follows, so that any cut of the same rows gives the same result.

  Args:
    recipe: static half.
    params: nested dict of float32 arrays.
    tokens: (micro-batches, rows, n) int32.
    draws: orders like tokens, or Masks with the same leading axes.
    key: dropout key; each micro-batch folds in its index.

  Returns:
    loss () float32 nats per token, and gradients shaped as params.
  """
  def summed_nll(params, tokens, draws, index):
    model = nnx.merge(recipe.graphdef, params)
    drop_key = jax.random.fold_in(key, index) if recipe.config.model.dropout_rate else None
    return objective.loss_terms(model, tokens, draws, drop_key).sum()

  def add(total, micro):
    return jax.tree.map(jnp.add, total, jax.value_and_grad(summed_nll)(params, *micro)), None

  zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
  (nll, grads), _ = jax.lax.scan(add, zero, (tokens, draws, jnp.arange(tokens.shape[0])))
  return nll / tokens.size, jax.tree.map(lambda g: g / tokens.size, grads)


def update(recipe: Recipe, state: TrainState, tokens: jax.Array, draws: jax.Array | masks.Masks,
           ) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimiser step on given tokens and orders (or Masks), cut into micro-batches.

  Returns:
    The new state, and metrics (scalars float32): nats_per_token, grad_norm (before clipping),
    learning_rate.
  """
  c = recipe.config
  key = keys.stream_key(c.seed, 'dropout', state.step)
  loss, grads = accumulate(recipe, state.params, tokens, draws, key)
  changes, opt_state = recipe.optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, changes)
  step = state.step + 1
  ema = optimizer_lib.update_ema(state.ema, params, step, c.optimizer.ema_decay)
  metrics = {'nats_per_token': loss, 'grad_norm': optax.tree.norm(grads),
             'learning_rate': optimizer_lib.learning_rate(c)(state.step)}
  return TrainState(step, params, ema, opt_state), metrics


def draw(recipe: Recipe, step: jax.Array, batch: int, length: int) -> jax.Array | masks.Masks:
  """What the loss of a step averages over: an order for each row, or, for an encoder, a mask."""
  key = keys.stream_key(recipe.config.seed, 'order', step)
  if recipe.config.model.architecture == 'encoder':
    return masks.sample(recipe.config.diffusion.masking, key, jnp.arange(batch), batch, length)
  return recipe.order.sample(key, batch, length)


def train_step(recipe: Recipe, state: TrainState, tokens: jax.Array,
               ) -> tuple[TrainState, dict[str, jax.Array]]:
  """`update` on tokens (B, n) int32, with orders drawn from (seed, step, row of the batch)."""
  draws = draw(recipe, state.step, *tokens.shape)
  # Every micro-batch is spread over all devices; without being told, XLA gives each device whole
  # micro-batches, and then computes all rows of each on every device.
  micro = lambda x: sharding_lib.constrain_rows(
      x.reshape(recipe.config.train.accumulation, -1, *x.shape[1:]), axis=1)
  return update(recipe, state, micro(tokens), jax.tree.map(micro, draws))


def jit_step(recipe: Recipe, state_shardings: TrainState, batch_sharding: Any,
             ) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
  """Compiles `train_step` for a mesh; the old state's memory is reused for the new one."""
  replicated = state_shardings.step
  step = sharding_lib.on_mesh(replicated.mesh, functools.partial(train_step, recipe))
  return jax.jit(step, donate_argnums=0, in_shardings=(state_shardings, batch_sharding),
                 out_shardings=(state_shardings, replicated))
