"""Models for tests, made and run under jit: op by op, compiling dominates every test."""

import functools

import jax
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.model import AOGPT


@functools.cache
def _init(config: ModelConfig):
  graphdef = nnx.graphdef(nnx.eval_shape(lambda: AOGPT(config, rngs=nnx.Rngs(0))))
  init = jax.jit(lambda key: nnx.to_pure_dict(
      nnx.state(AOGPT(config, rngs=nnx.Rngs(key)), nnx.Param)))
  return graphdef, init


def make_model(config: ModelConfig, seed: int = 0) -> AOGPT:
  """AOGPT(config, rngs=nnx.Rngs(seed))."""
  graphdef, init = _init(config)
  return nnx.merge(graphdef, init(jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(function, graphdef, params, *args):
  return function(nnx.merge(graphdef, params), *args)


def _logits(model, *args):
  return model(*args)


def logits(model: AOGPT, *args) -> jax.Array:
  """model(*args) under jit."""
  return apply(_logits, model, *args)


def apply(function, model: AOGPT, *args):
  """function(model, *args) under jit; pass a named function, so that compilations are reused."""
  graphdef, params = nnx.split(model)
  return _apply(function, graphdef, params, *args)
