"""Figure 2a: one fixed order each, how fast is it learnt? (Findings 2.1 and 2.2.)

    python -m aogpt_jax.main --config=configs/paper/figure2a.py:left_to_right \
        --workdir=runs/figure2a/left_to_right

Variants, each one order for all sequences:
  left_to_right: 0, 1, 2, …
  random0, random1, random2: three fixed random permutations of the 1024 positions.
  blockwise: blocks of 4 left to right, inside every block 0→2→3→1.

20k steps of 0.5M tokens a variant, 10.5 billion. The learning rate is that of the first 20k steps
of the full run: the paper states one schedule, which ends at step 500k. All variants train the net
of AO-GPT small.
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected loss curves, best first: left_to_right, blockwise, then the three random orders. The paper
gives no numbers. metrics.jsonl holds the training loss, and the validation loss in the run's own
order next to those in left-to-right and uniform orders.
"""

from aogpt_jax import config as config_lib

VARIANTS = ('left_to_right', 'random0', 'random1', 'random2', 'blockwise')


def get_config(variant: str = 'left_to_right'):
  config_lib.check_choice('variant', variant, VARIANTS)
  config = config_lib.paper()
  if variant.startswith('random'):
    config.order.name = 'fixed'
    config.order.seed = int(variant.removeprefix('random'))
  elif variant == 'blockwise':
    config.order.name = 'blockwise'
    config.order.permutation = (0, 2, 3, 1)
  else:
    config.order.name = 'left_to_right'
  config.optimizer.decay_steps = 500_000
  config.train.num_steps = 20_000
  return config
