"""Figure 2b: any-order against left-to-right training with one net. (Findings 1, 3.1 and 3.2.)

    python -m aogpt_jax.main --config=configs/paper/figure2b.py:mixture \
        --workdir=runs/figure2b/mixture

Variants, all with the net of AO-GPT small:
  left_to_right: the autoregressive model.
  any_order: uniform orders.
  mixture: AO-GPT, uniform orders but 10 % left to right.

These are the runs that its findings compare; the figure itself was not at hand.

500k steps of 0.5M tokens a variant, 262 billion; the validation losses of every 1000 steps are in
metrics.jsonl. The length of the paper's runs is not known to us. A shorter one with the same
learning rates: --config.train.num_steps=20000 --config.optimizer.decay_steps=500000
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected: the training loss of any_order falls more slowly than that of left_to_right (1); mixture
has a much better left-to-right validation loss than any_order (3.1), and also a better any-order
one (3.2). The paper gives no numbers for the curves.
"""

from aogpt_jax import config as config_lib

VARIANTS = ('left_to_right', 'any_order', 'mixture')


def get_config(variant: str = 'left_to_right'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  if variant == 'left_to_right':
    config.order.name = 'left_to_right'
  elif variant == 'any_order':
    config.order.name = 'uniform'
  return config
