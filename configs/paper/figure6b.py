"""Figure 6b: the decay of the average of the weights (EMA) that is evaluated.

    python -m aogpt_jax.main --config=configs/paper/figure6b.py:ema_0.999 \
        --workdir=runs/figure6b/ema_0.999

Variants, all else as AO-GPT small: no_ema, ema_0.99, ema_0.999, ema_0.9999 (AO-GPT's). The weights
that are trained are the same in all four; the average, and so the validation losses, differ.

500k steps of 0.5M tokens a variant, 262 billion; the validation losses of every 1000 steps are in
metrics.jsonl. The length of the paper's runs is not known to us. A shorter one with the same
learning rates: --config.train.num_steps=20000 --config.optimizer.decay_steps=500000
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected: ema_0.9999, the paper's choice, ends best. The curves have no
printed numbers.
"""

from aogpt_jax import config as config_lib

VARIANTS = ('no_ema', 'ema_0.99', 'ema_0.999', 'ema_0.9999')


def get_config(variant: str = 'no_ema'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  config.optimizer.ema_decay = 0.0 if variant == 'no_ema' else float(variant.removeprefix('ema_'))
  return config
