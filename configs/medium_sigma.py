"""σ-GPT medium (355,650,560 parameters): the "σ-GPT" rows of the paper's table of medium models.

    python -m aogpt_jax.main --config=configs/medium_sigma.py --workdir=runs/medium_sigma

The target position is added once, to the input; LayerNorm, a tied head and a normal initialiser as
GPT-2, no norm of queries and keys.

The orders are uniform, the objective of the original σ-GPT: the paper lists the model plainly and
does not say that 10 % of its orders are left to right. With --config.model.use_bias=True the linear
layers and LayerNorm have biases: 355,921,920 parameters.

500k steps of 0.5M tokens, 262 billion in all.
Meant for eight devices of 80 GB as configs/medium.py; on one add --config.train.accumulation=128.

Expected zero-shot perplexity on LAMBADA, WikiText2, PTB, WikiText103, 1BW:
  left to right      61.05  44.80  121.48  43.68  76.74
  any order          57.27  43.28  126.11  41.80  74.81
"""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.paper()
  config.model.num_layers = 24
  config.model.num_heads = 16
  config.model.embed_dim = 1024
  config.model.target_injection = 'input'
  config.model.norm = 'layernorm'
  config.model.qk_norm = False
  config.model.tie_embeddings = True
  config.model.head_bias = False
  config.model.initializer = 'normal'
  config.order.name = 'uniform'
  config.optimizer.learning_rate = 3e-4
  config.train.accumulation = 16
  return config
