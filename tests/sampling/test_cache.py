"""Segments of the cache: what is generated does not depend on them, and no step copies one."""

import jax
import numpy as np
import pytest
from flax import nnx

from aogpt_jax import orders as orders_lib, sampling
from aogpt_jax.config import ModelConfig
from aogpt_jax.model import AOGPT
from aogpt_jax.sampling import cache as cache_lib, parallel

N, ROWS = 24, 12
CONFIG = ModelConfig(vocab_size=11, context_length=N, num_layers=1, num_heads=2, embed_dim=16,
                     condition_dim=8, init_std=0.5)


@pytest.mark.parametrize(('first', 'last', 'slots'), [
    (0, 64, (64,)), (0, 65, (33, 65)), (0, 1024, (256, 512, 768, 1024)), (10, 138, (74, 138)),
    (5, 5, (5,))])
def test_segments_are_few_and_not_small(first, last, slots):
  assert cache_lib.cut(first, last) == slots


def test_a_step_runs_in_the_first_segment_that_holds_what_it_writes():
  """3 segments of 4, 8 and 12 slots; steps need 2, 4, 5, 8 and 12 slots."""
  np.testing.assert_array_equal(cache_lib.turns((4, 8, 12), np.array([2, 4, 5, 8, 12])),
                                [0, 2, 4, 5])


def _model_and_orders():
  model = AOGPT(CONFIG, rngs=nnx.Rngs(0))
  return model, orders_lib.make('uniform').sample(jax.random.key(1), ROWS, N)


def _generate(kind):
  model, orders = _model_and_orders()
  options = dict(tokens=np.full((ROWS, N), 7), prompt_length=np.tile([0, 2, 5], 4),
                 end=np.tile([N, N - 3, N], 4))
  key = jax.random.key(2)
  if kind == 'parallel':
    return sampling.generate(model, key, orders, steps=9, schedule='cosine', **options)
  if kind == 'adaptive':
    return sampling.adaptive(model, key, orders, candidates=3, **options).tokens
  return sampling.speculative(model, key, orders, window=3, scheme=kind, **options).tokens


@pytest.mark.parametrize('kind', [
    'parallel', 'FS', *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('adaptive', 'T'))])
def test_segments_do_not_change_what_is_generated(kind, monkeypatch):
  """One segment against segments of 5 slots and less: the same tokens."""
  jax.clear_caches()
  plain = np.asarray(_generate(kind))
  monkeypatch.setattr(cache_lib, 'MIN_SEGMENT', 5)
  assert len(cache_lib.cut(5, N)) == 4
  jax.clear_caches()
  np.testing.assert_array_equal(_generate(kind), plain)
  jax.clear_caches()  # what was compiled for segments of 5


def test_no_step_copies_the_cache(monkeypatch):
  """XLA writes into it: no loop holds a copy of an array of (rows, heads, width, slots)."""
  model, orders = _model_and_orders()
  programs = []
  compiled = parallel._generate
  monkeypatch.setattr(parallel, '_generate', lambda *args, **options: (
      programs.append(compiled.lower(*args, **options).compile().as_text()),
      compiled(*args, **options))[1])
  sampling.generate(model, jax.random.key(0), orders)
  (program,) = programs
  shape = f'f32[{ROWS},{CONFIG.num_heads},{CONFIG.head_dim},{N}]'
  assert shape in program
  loops = [part for part in program.split('\n\n') if 'while' in part.split('{')[0]
           or 'region' in part.split('{')[0]]
  assert loops and not any(f'{shape}{{3,2,1,0}} copy(' in part for part in loops)
