"""AO-GPT medium (425,583,744 parameters): the "AO-GPT" rows of the paper's table of medium models.

    python -m aogpt_jax.main --config=configs/medium.py --workdir=runs/medium
    python -m aogpt_jax.main --config=configs/medium.py:released --workdir=runs/medium_released

Variants:
  paper: 500k steps of 0.5M tokens (512 sequences), 262 billion tokens in all.
  released: as the checkpoint that the authors released: 460k steps of 1,048,576 tokens, 482 billion
    in all, less weight decay, stopped before the end of a cosine that ends at step 500k.

Meant for eight devices of 80 GB as data × fsdp × tensor = 8 × 1 × 1 (the default mesh), 4 sequences
each in a micro-batch; on one device add --config.train.accumulation=128 (256 for released).
A step takes about 1.6 GB a sequence beside the state, by XLA's plan for a CPU (--dry_run); this was
not measured on an accelerator. The paper's training hardware is not known to us; its generation
speed was measured on one H800.

Expected zero-shot perplexity on LAMBADA, WikiText2, PTB, WikiText103, 1BW:
  left to right      42.44  31.52   87.56  30.86  50.23
  any order          49.79  33.73  101.01  32.38  65.90
  ensemble of 8      45.08  30.63   87.74  29.46  59.11
  ensemble of 64     44.31  30.16   85.75  28.98  58.18
"""

from aogpt_jax import config as config_lib

VARIANTS = ('paper', 'released')


def get_config(variant: str = 'paper'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  config.model.num_layers = 24
  config.model.num_heads = 16
  config.model.embed_dim = 1024
  config.optimizer.learning_rate = 3e-4
  config.train.accumulation = 16
  if variant == 'released':
    config.optimizer.decay_steps = 500_000
    config.optimizer.weight_decay = 0.03
    config.train.num_steps = 460_000
    config.train.batch_size = 1024
    config.train.accumulation = 32
  return config
