"""σ-GPT small (125,161,728 parameters): the "σ-GPT" rows of the paper's table of small models.

    python -m aogpt_jax.main --config=configs/small_sigma.py --workdir=runs/small_sigma

The target position is added once, to the input; LayerNorm, a tied head and a normal initialiser as
GPT-2, no norm of queries and keys.

The orders are uniform, the objective of the original σ-GPT: the paper lists the model plainly and
does not say that 10 % of its orders are left to right. With --config.model.use_bias=True the linear
layers and LayerNorm have biases: 125,263,872 parameters.

500k steps of 0.5M tokens, 262 billion in all.
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected zero-shot perplexity on LAMBADA, WikiText2, PTB, WikiText103, 1BW:
  left to right      68.61  57.66  146.87  55.54  90.98
  any order          65.83  53.08  138.61  50.75  87.71
"""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.paper()
  config.model.target_injection = 'input'
  config.model.norm = 'layernorm'
  config.model.qk_norm = False
  config.model.tie_embeddings = True
  config.model.head_bias = False
  config.model.initializer = 'normal'
  config.order.name = 'uniform'
  return config
