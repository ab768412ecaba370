"""A masked diffusion encoder: the "RADD" rows of the paper's table of small models.

    python -m aogpt_jax.main --config=configs/small_encoder.py --workdir=runs/small_encoder

Full attention over tokens and masks, rotary positions, and RADD's λ-denoising loss (the masked
share is the time t, the default of diffusion.masking). All else is as in configs/small.py, so the
two differ in architecture and not in norms, initialiser or head.

500k steps of 0.5M tokens, 262 billion in all.
Meant for eight devices of 80 GB as configs/small.py; on one add --config.train.accumulation=64.

Expected, near RADD small (and SEDD small, an encoder with another loss), zero-shot perplexity on
LAMBADA, WikiText2, PTB, WikiText103, 1BW:
  RADD, left to right      49.09  38.26  107.78  38.41  63.33
  RADD, any order          50.27  38.26  110.38  35.90  74.28
  SEDD, left to right      49.41  41.19  118.74  41.70  72.60
  SEDD, any order          50.92  41.84  114.24  40.62  79.29
"""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.paper()
  config.model.architecture = 'encoder'
  config.model.target_injection = 'none'
  config.model.position_encoding = 'rotary'
  config.order.name = 'uniform'
  return config
