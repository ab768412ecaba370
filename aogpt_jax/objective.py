"""The any-order objective (paper section 1): negative log-likelihood along an order, in nats."""

import jax
import jax.numpy as jnp

from aogpt_jax.model import AOGPT


def _nll(model: AOGPT, hidden: jax.Array, targets: jax.Array) -> jax.Array:
  """hidden (B, m, d), targets (B, m) int32 -> (B, m) float32."""
  logits = model.logits(hidden)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def _chunked_nll(model: AOGPT, hidden: jax.Array, targets: jax.Array, chunk: int) -> jax.Array:
  """`_nll` over slices of `chunk` generation steps; only one slice of logits exists at a time.

  Slices are cut along the steps, so rows stay where they are on a mesh; the backward pass computes
  the logits of a slice again.
  """
  length = targets.shape[1]
  padding = -length % chunk
  slices = lambda x: jnp.moveaxis(
      jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)).reshape(
          x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
  one = jax.checkpoint(lambda h, y: _nll(model, h, y), prevent_cse=False)
  _, nll = jax.lax.scan(lambda _, hy: (None, one(*hy)), None, (slices(hidden), slices(targets)))
  return jnp.moveaxis(nll, 0, 1).reshape(targets.shape[0], -1)[:, :length]


def token_nll(model: AOGPT, tokens: jax.Array, orders: jax.Array,
              key: jax.Array | None = None) -> jax.Array:
  """-log p(x_σ(t) | x_σ(<t), σ(t)) of every token.

  Args:
    model: an AOGPT; its config.loss_chunk bounds the logits that exist at once.
    tokens: (B, n) int32 in sequence order.
    orders: (B, n) int32, row b a permutation.
    key: dropout key; None: no dropout.

  Returns:
    (B, n) float32 nats, in generation order: entry t belongs to tokens[b, orders[b, t]].
  """
  hidden = model.hidden(tokens, orders, key)
  targets = jnp.take_along_axis(tokens, orders, axis=1)
  chunk = model.config.loss_chunk
  if chunk and chunk < tokens.shape[1]:
    return _chunked_nll(model, hidden, targets, chunk)
  return _nll(model, hidden, targets)


def ao_ar_loss(model: AOGPT, tokens: jax.Array, orders: jax.Array,
               key: jax.Array | None = None) -> jax.Array:
  """L_AO-AR of the paper, as a mean over tokens: () float32 nats per token.

  With uniform orders it estimates the masked-diffusion bound, with the identity the log-likelihood
  of an autoregressive model. Its exponential is the perplexity.
  """
  return token_nll(model, tokens, orders, key).mean()
