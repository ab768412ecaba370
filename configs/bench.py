"""Sizes of the benchmarks: an AO-GPT of 6 layers on a few CPU cores. Nothing is trained.

    python -m aogpt_jax.main --config=configs/bench.py --mode=bench --suite=train
    python -m aogpt_jax.main --config=configs/bench.py --mode=bench --suite=generate
    python -m aogpt_jax.main --config=configs/bench.py --mode=bench --suite=growth
    python -m aogpt_jax.main --config=configs/bench.py --mode=bench --suite=evaluate
    python -m aogpt_jax.main --config=configs/bench.py --mode=bench --suite=data
    python -m aogpt_jax.main --config=configs/bench.py:memory --mode=bench --suite=compile
    python -m aogpt_jax.main --config=configs/bench.py:top_p --mode=bench --suite=top_p
    python -m aogpt_jax.main --config=configs/bench.py:curve --mode=bench --suite=encoder

Variants:
  small: 8 sequences of 256 tokens, vocabulary 4,096.
  memory: 2 layers, 8 sequences of 1,024 tokens, the vocabulary of GPT-2, and what the big configs
    do to save memory (config_lib.paper()).
  top_p: the widths of AO-GPT small and its vocabulary; 8 texts of 32 tokens.
  curve: one text of 1,024 tokens, which the encoder computes at every step, so small a model.

With --output=DIRECTORY the tables are also written as Markdown, JSON and CSV; --peer=none leaves
out GPT-2 of Hugging Face, which needs pip install -e '.[bench]'.
"""

from aogpt_jax import config as config_lib

VARIANTS = ('small', 'memory', 'top_p', 'curve')


def get_config(variant: str = 'small'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.default()
  config.train.batch_size = 8
  config.eval.batch_size = 8
  config.sample.num_samples = 8
  config.sample.temperature = 0.9
  config.sample.top_p = 0.95
  if variant == 'top_p':
    config.sample.steps = 32
    return config
  config.model.num_layers = 6
  config.model.num_heads = 6
  config.model.embed_dim = 384
  if variant == 'memory':
    config.model.num_layers = 2
    config.model.loss_chunk = 128
    config.model.remat = 'dots'
    return config
  config.model.scan_layers = False  # few layers: unrolled is faster, and compiles soon enough
  config.model.vocab_size = 4096
  if variant == 'curve':
    config.model.num_layers = 3
    config.model.num_heads = 4
    config.model.embed_dim = 128
    config.sample.num_samples = 1
    return config
  config.model.context_length = 256
  return config
