"""AO-GPT small (170,523,008 parameters): the "AO-GPT" rows of the paper's table of small models.

    python -m aogpt_jax.main --config=configs/small.py --workdir=runs/small
    python -m aogpt_jax.main --config=configs/small.py:released --workdir=runs/small_released

Variants:
  paper: 500k steps of 0.5M tokens (512 sequences), 262 billion tokens in all.
  released: as the checkpoint that the authors released: 250k steps of 1,048,576 tokens, 262 billion
    in all, less weight decay, stopped halfway through a cosine that ends at step 500k.

Meant for eight devices of 80 GB as data × fsdp × tensor = 8 × 1 × 1 (the default mesh), 8 sequences
each in a micro-batch; on one device add --config.train.accumulation=64 (128 for released).
A step takes about 0.7 GB a sequence beside the state, by XLA's plan for a CPU (--dry_run); this was
not measured on an accelerator. The paper's training hardware is not known to us.

Expected zero-shot perplexity on LAMBADA, WikiText2, PTB, WikiText103, 1BW:
  left to right      52.46  42.10  135.96  40.97  71.73
  any order          59.93  46.33  141.92  45.44  84.36
  ensemble of 8      55.62  42.77  126.08  42.02  77.62
  ensemble of 64     54.92  42.24  123.49  41.51  76.73
"""

from aogpt_jax import config as config_lib

VARIANTS = ('paper', 'released')


def get_config(variant: str = 'paper'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  if variant == 'released':
    config.optimizer.decay_steps = 500_000
    config.optimizer.weight_decay = 0.03
    config.train.num_steps = 250_000
    config.train.batch_size = 1024
    config.train.accumulation = 16
  return config
