"""AO-GPT small without left-to-right orders: the pure any-order ablation (random_ratio 1.0).

    python -m aogpt_jax.main --config=configs/small_any_order.py --workdir=runs/small_any_order

500k steps of 0.5M tokens, 262 billion in all.
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected against configs/small.py, whose orders are 10 % left to right: a much worse left-to-right
loss (finding 3.1), and a worse any-order loss too (finding 3.2). No perplexity of
its own is tabulated.
"""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.paper()
  config.order.name = 'uniform'
  return config
