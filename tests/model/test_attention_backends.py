"""Attention backends against the dense one, through the mask and decode contracts, and choice."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax import sharding
from aogpt_jax.config import MeshConfig
from aogpt_jax.model import attention, attention_backends as backends


def _inputs(length, batch=1, heads=2, width=8, dtype=jnp.float32):
  return [jax.random.normal(jax.random.key(i), (batch, length, heads, width)).astype(dtype)
          for i in range(4)]


def _with_gradients(attend, query, key, value, cotangent):
  """What `attend` returns, and the gradients of all three inputs."""
  out, pull = jax.vjp(attend, query, key, value)
  return out, *pull(cotangent)


def _dense(query, key, value, causal=True):
  return attention.attend(query, key, value, None, causal, 'dense')


@pytest.fixture
def said(caplog):
  """The log lines; every reason is news again."""
  backends._say.cache_clear()
  caplog.set_level(logging.INFO, logger='aogpt_jax')
  return lambda: [record.message for record in caplog.records]


@pytest.mark.parametrize(('length', 'block'), [
    (1, 128), (37, 16), (100, 128), (100, 48), (128, 32), (1024, 128)])
def test_blocked_is_dense_in_values_and_gradients(length, block):
  """Lengths below, at and above one block, ragged last blocks among them."""
  inputs = _inputs(length)
  want = jax.jit(lambda *x: _with_gradients(_dense, *x))(*inputs)
  got = jax.jit(lambda *x: _with_gradients(
      lambda *qkv: backends.blocked(*qkv, block=block), *x))(*inputs)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_blocked_never_holds_all_scores_and_skips_what_is_ahead():
  """No array of 1024 x 1024 in the program, and 9/16 of the products (8 blocks: (1 + 1/8) / 2)."""
  inputs = _inputs(1024)
  compiled = {name: jax.jit(lambda *x, f=f: _with_gradients(f, *x)).lower(*inputs).compile()
              for name, f in (('dense', _dense), ('blocked', backends.blocked))}
  assert '1024,1024' in compiled['dense'].as_text()
  assert '1024,1024' not in compiled['blocked'].as_text()
  products = 2 * 2 * 1024**2 * 8  # FLOPs of one of dense's six products, 2 heads of width 8
  count = compiled['blocked'].cost_analysis()['flops']
  assert count < 9 / 16 * 7 * products * 1.6  # seven products; the rest is the softmax


def test_blocked_takes_bfloat16():
  """bfloat16 in and out, within its rounding of float32; gradients too."""
  low, high = _inputs(200, dtype=jnp.bfloat16), _inputs(200)
  got = jax.jit(lambda *x: _with_gradients(backends.blocked, *x))(*low)
  want = jax.jit(lambda *x: _with_gradients(_dense, *x))(*high)
  for a, b in zip(got, want, strict=True):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=0.1)


@pytest.mark.parametrize('causal', [True, False])
def test_splash_in_interpret_mode_is_dense(causal):
  inputs = _inputs(128, batch=2)
  want = _with_gradients(lambda *x: _dense(*x, causal=causal), *inputs)
  got = jax.jit(lambda *x: _with_gradients(
      lambda *qkv: backends.splash(*qkv, causal=causal, interpret=True), *x))(*inputs)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_splash_runs_on_the_rows_and_heads_of_each_device():
  """On a mesh: the same numbers, the output where the rows and heads are, and no collective."""
  mesh = sharding.make_mesh(MeshConfig(2, 2, 2))
  placed = jax.sharding.NamedSharding(mesh, jax.P(('data', 'fsdp'), None, 'tensor'))
  inputs = _inputs(128, batch=4)[:3]
  run = jax.jit(sharding.on_mesh(mesh, lambda *x: backends.splash(*x, True, interpret=True)),
                in_shardings=placed)
  got = run(*(jax.device_put(x, placed) for x in inputs))
  np.testing.assert_allclose(got, _dense(*inputs), rtol=0, atol=1e-5)
  assert got.sharding.spec == placed.spec
  assert 'all-gather' not in run.lower(*inputs).compile().as_text()


def _choose(wanted, platform, length=1024, dtype=jnp.bfloat16, width=64, causal=True,
            cached=False):
  query = jax.ShapeDtypeStruct((2, length, 4, width), dtype)
  return backends.choose(wanted, query, causal, cached, platform)


def test_auto_takes_the_fast_one_of_every_platform(said):
  assert _choose('auto', 'gpu') == 'cudnn' and _choose('auto', 'tpu') == 'splash'
  assert _choose('auto', 'cpu') == 'blocked'
  assert _choose('auto', 'tpu', dtype=jnp.float32, width=24) == 'splash'
  # The quickstart's numbers stay: a short sequence is dense. So are a cache and an encoder.
  assert _choose('auto', 'cpu', length=64) == _choose('auto', 'cpu', length=128) == 'dense'
  assert _choose('auto', 'cpu', cached=True) == _choose('auto', 'cpu', causal=False) == 'dense'
  assert not said()


@pytest.mark.parametrize(('wanted', 'platform', 'options', 'reason'), [
    ('auto', 'gpu', dict(dtype=jnp.float32), 'cudnn, which takes bfloat16 or float16, and model'),
    ('auto', 'gpu', dict(width=20), 'cudnn, which takes head widths up to 128'),
    ('auto', 'gpu', dict(width=256), 'this is 256'),
    ('auto', 'gpu', dict(cached=True), 'cudnn, which cannot read a cache'),
    ('auto', 'tpu', dict(length=100), 'splash, which takes lengths that are multiples of 128'),
    ('splash', 'tpu', dict(cached=True), 'splash, which cannot read a cache'),
    ('cudnn', 'cpu', {}, 'cudnn, which runs on gpu, and this is cpu'),
    ('splash', 'gpu', {}, 'splash, which runs on tpu, and this is gpu'),
    ('blocked', 'cpu', dict(causal=False), 'blocked, which is causal'),
    ('blocked', 'cpu', dict(cached=True), 'blocked, which cannot read a cache')])
def test_what_a_backend_cannot_do_falls_to_dense_and_is_said_once(
    wanted, platform, options, reason, said):
  for _ in range(3):
    assert _choose(wanted, platform, **options) == 'dense'
  (line,) = said()
  assert line.startswith('attention: dense instead of ') and reason in line


@pytest.mark.parametrize('wanted', ['auto', 'blocked', 'cudnn', 'splash'])
def test_every_backend_reads_a_cache_and_takes_any_length(wanted, said):
  """Decode masks, and a length that some refuse: the numbers of dense, whatever was asked for."""
  query, key, value, past_value = _inputs(150)
  past_key, past_value = (jnp.moveaxis(x, 1, -1) for x in (value[:, ::-1], past_value))
  masks = jnp.tri(150, dtype=bool), jnp.eye(150, dtype=bool)
  for past in (None, attention.Past(past_key, past_value, *masks)):
    got = attention.attend(query, key, value, past, True, wanted)
    want = attention.attend(query, key, value, past, True, 'dense')
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
  assert len(said()) == (0 if wanted == 'auto' else 1)
