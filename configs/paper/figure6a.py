"""Figure 6a: how the target position enters the net (the variants of Figure 5).

    python -m aogpt_jax.main --config=configs/paper/figure6a.py:input --workdir=runs/figure6a/input

Variants, all else as AO-GPT small:
  adaln: (b) it modulates every block. AO-GPT's.
  input: (a) added once, to the input of the first block. σ-GPT's.
  every_block: (c) the same embedding added to the input of every block.
  every_block_distinct: (d) an embedding for every block, added to its input.

500k steps of 0.5M tokens a variant, 262 billion; the validation losses of every 1000 steps are in
metrics.jsonl. The length of the paper's runs is not known to us. A shorter one with the same
learning rates: --config.train.num_steps=20000 --config.optimizer.decay_steps=500000
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected: adaln has the best loss throughout. The paper gives no numbers for the curves.
"""

from aogpt_jax import config as config_lib

VARIANTS = ('adaln', 'input', 'every_block', 'every_block_distinct')


def get_config(variant: str = 'adaln'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  config.model.target_injection = variant
  return config
