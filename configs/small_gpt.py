"""A left-to-right GPT of GPT-2's shape: for the "GPT-2" row of the paper's table of small models.

    python -m aogpt_jax.main --config=configs/small_gpt.py --workdir=runs/small_gpt

It is not told the target position, so it knows one order. With biases, as GPT-2.

500k steps of 0.5M tokens, 262 billion in all.
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

The row is OpenAI's GPT-2 small and no model of the paper: other data and training, so not a number
to be met, but the one to compare with. Zero-shot perplexity on LAMBADA, WikiText2, PTB,
WikiText103, 1BW:
  left to right      45.04  42.43  138.43  41.60  75.20
"""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.paper()
  config.model.target_injection = 'none'
  config.model.norm = 'layernorm'
  config.model.qk_norm = False
  config.model.tie_embeddings = True
  config.model.head_bias = False
  config.model.initializer = 'normal'
  config.model.use_bias = True
  config.order.name = 'left_to_right'
  return config
