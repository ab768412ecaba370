"""The linear layer's own gradient rule, the norms and GELU."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from aogpt_jax.config import ModelConfig
from aogpt_jax.model import layers


@pytest.mark.parametrize(('contracted', 'kernel_shape'), [
    (1, (6, 5)), (1, (6, 3, 2, 5)), (2, (4, 6, 5)), (2, (4, 6, 5, 2))])
def test_matmul_has_the_gradient_of_einsum(contracted, kernel_shape):
  """Value, dx and dkernel equal jax's own rule, for 1 and 2 contracted axes."""
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (2, 3, *kernel_shape[:contracted]))
  kernel = jax.random.normal(keys[1], kernel_shape)
  y, pullback = jax.vjp(lambda x, k: layers.matmul(x, k, contracted), x, kernel)
  want, want_pullback = jax.vjp(lambda x, k: jnp.tensordot(x, k, contracted), x, kernel)
  g = jax.random.normal(keys[2], want.shape)
  chex.assert_trees_all_close((y, pullback(g)), (want, want_pullback(g)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('kind', ['rmsnorm', 'layernorm', 'layernorm without bias'])
def test_norms_are_the_formulas(kind):
  """x / sqrt(mean(x²) + 1e-5) * scale, or of x - mean(x), plus a bias if biases are in use.

  The input is as small as the epsilon, so that it counts.
  """
  config = ModelConfig(norm=kind.split()[0], use_bias='without' not in kind)
  x = 0.004 * jax.random.normal(jax.random.key(0), (3, 8))
  norm = layers.make_norm(config, 8, rngs=nnx.Rngs(0))
  norm.scale[...] = jnp.arange(8.0)
  x64 = np.asarray(x, np.float64)
  if kind != 'rmsnorm':
    x64 = x64 - x64.mean(axis=-1, keepdims=True)
  want = x64 / np.sqrt((x64 ** 2).mean(axis=-1, keepdims=True) + 1e-5) * np.arange(8)
  if kind == 'layernorm':
    norm.bias[...] = jnp.arange(8.0) - 3
    want += np.arange(8) - 3
  else:
    assert getattr(norm, 'bias', None) is None
  np.testing.assert_allclose(norm(x), want, rtol=1e-5, atol=1e-6)


def test_gelu_is_exact_with_its_gradient():
  """x · Φ(x), and Φ(x) + x · φ(x); the tanh approximation is off by up to 5e-4."""
  x = np.linspace(-6, 6, 601)
  value, gradient = jax.vmap(jax.value_and_grad(layers.gelu))(jnp.asarray(x, jnp.float32))
  normal = scipy.stats.norm
  np.testing.assert_allclose(value, x * normal.cdf(x), rtol=0, atol=1e-6)
  np.testing.assert_allclose(gradient, normal.cdf(x) + x * normal.pdf(x), rtol=0, atol=1e-6)
