"""Figure 7: both ablations together, target injection (Figure 6a) × weight average (Figure 6b).

    python -m aogpt_jax.main --config=configs/paper/figure7.py:input_no_ema \
        --workdir=runs/figure7/input_no_ema

Variants, all else as AO-GPT small, so input is σ-GPT's injection in the net of AO-GPT:
  input_no_ema, adaln_no_ema: evaluated with the weights as they are trained.
  input_ema, adaln_ema: evaluated with their average, decay 0.9999.

500k steps of 0.5M tokens a variant, 262 billion; the validation losses of every 1000 steps are in
metrics.jsonl. The length of the paper's runs is not known to us. A shorter one with the same
learning rates: --config.train.num_steps=20000 --config.optimizer.decay_steps=500000
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected: adaln_ema, which is AO-GPT, best of the four. The curves have no
printed numbers.
"""

from aogpt_jax import config as config_lib

VARIANTS = ('input_no_ema', 'input_ema', 'adaln_no_ema', 'adaln_ema')


def get_config(variant: str = 'input_no_ema'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  if variant.startswith('input'):
    config.model.target_injection = 'input'
  if variant.endswith('no_ema'):
    config.optimizer.ema_decay = 0.0
  return config
