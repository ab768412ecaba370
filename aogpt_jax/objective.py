"""The objectives (paper section 1), in nats: NLL along an order, and the masked-diffusion bound."""

import jax
import jax.numpy as jnp

from aogpt_jax.masks import Masks
from aogpt_jax.model import AOGPT, MaskedEncoder
from aogpt_jax.model.decoder import make_items

Model = AOGPT | MaskedEncoder


def _nll(model: Model, hidden: jax.Array, targets: jax.Array) -> jax.Array:
  """hidden (B, m, d), targets (B, m) int32 -> (B, m) float32."""
  logits = model.logits(hidden)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def _chunked_nll(model: Model, hidden: jax.Array, targets: jax.Array, chunk: int) -> jax.Array:
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


def _sequence_nll(model: Model, hidden: jax.Array, targets: jax.Array) -> jax.Array:
  """`_nll` of a whole sequence, in chunks if config.loss_chunk says so."""
  chunk = model.config.loss_chunk
  if chunk and chunk < targets.shape[1]:
    return _chunked_nll(model, hidden, targets, chunk)
  return _nll(model, hidden, targets)


def _prefix_nll(model: MaskedEncoder, tokens: jax.Array, orders: jax.Array) -> jax.Array:
  """An encoder's NLL along orders: n forward passes over growing prefixes, one term of each."""
  tokens, orders = jnp.asarray(tokens), jnp.asarray(orders)
  rank = jnp.argsort(orders, axis=1)  # when each position is generated

  def term(t):
    at = orders[:, t][:, None]
    hidden = model.hidden(tokens, rank >= t)
    one = jnp.take_along_axis(hidden, at[..., None], axis=1)
    return _nll(model, one, jnp.take_along_axis(tokens, at, axis=1))[:, 0]

  return jax.lax.map(term, jnp.arange(orders.shape[1])).T


def token_nll(model: Model, tokens: jax.Array, orders: jax.Array,
              key: jax.Array | None = None) -> jax.Array:
  """-log p(x_σ(t) | x_σ(<t), σ(t)) of every token.

  Args:
    model: an AOGPT, whose config.loss_chunk bounds the logits that exist at once; or a
      MaskedEncoder, which needs n forward passes and takes no key.
    tokens: (B, n) int32 in sequence order.
    orders: (B, n) int32, row b a permutation.
    key: dropout key; None: no dropout.

  Returns:
    (B, n) float32 nats, in generation order: entry t belongs to tokens[b, orders[b, t]].
  """
  if isinstance(model, MaskedEncoder):
    return _prefix_nll(model, tokens, orders)
  return _sequence_nll(model, model.hidden(tokens, orders, key),
                       jnp.take_along_axis(tokens, orders, axis=1))


def step_nll(model: AOGPT, tokens: jax.Array, orders: jax.Array, at: jax.Array,
             length: int) -> jax.Array:
  """-log p(x_σ(t) | x_σ(<t), σ(t)) of one step t a row, from the items before it alone.

  Args:
    model: an AOGPT.
    tokens: (B, n) int32.
    orders: (B, n) int32, row b a permutation.
    at: (B,) int32, the step of each row, below `length`.
    length: how many items are computed.

  Returns:
    (B,) float32 nats.
  """
  prefix = orders[:, :length]
  generated = jnp.take_along_axis(tokens, prefix, axis=1)
  hidden = model.hidden_of(make_items(generated, prefix))
  one = jnp.take_along_axis(hidden, at[:, None, None], axis=1)
  return _nll(model, one, jnp.take_along_axis(generated, at[:, None], axis=1))[:, 0]


def masked_nll(model: MaskedEncoder, tokens: jax.Array, masks: Masks,
               key: jax.Array | None = None) -> jax.Array:
  """The terms of the masked-diffusion bound for one draw of masks (see `aogpt_jax.masks`).

  Args:
    model: a MaskedEncoder.
    tokens: (B, n) int32.
    masks: one draw a row.
    key: dropout key; None: no dropout.

  Returns:
    (B, n) float32 nats in sequence order, 0 where not masked. The mean over all entries estimates
    the bound in nats per token; its exponential is the any-order perplexity.
  """
  nll = _sequence_nll(model, model.hidden(tokens, masks.masked, key), tokens)
  return jnp.where(masks.masked, nll * masks.weight[:, None], 0.0)


def loss_terms(model: Model, tokens: jax.Array, draws: jax.Array | Masks,
               key: jax.Array | None = None) -> jax.Array:
  """(B, n) float32 nats whose mean is the training loss: `token_nll` along orders, or `masked_nll`.

  Args:
    model: an AOGPT, or a MaskedEncoder.
    tokens: (B, n) int32.
    draws: what was drawn for each row: orders (B, n) int32, or Masks.
    key: dropout key; None: no dropout.
  """
  one = masked_nll if isinstance(draws, Masks) else token_nll
  return one(model, tokens, draws, key)


def ao_ar_loss(model: Model, tokens: jax.Array, orders: jax.Array,
               key: jax.Array | None = None) -> jax.Array:
  """L_AO-AR of the paper, as a mean over tokens: () float32 nats per token.

  With uniform orders it estimates the masked-diffusion bound, with the identity the log-likelihood
  of an autoregressive model. Its exponential is the perplexity.
  """
  return token_nll(model, tokens, orders, key).mean()
