"""A small any-order model of Shakespeare, on two CPU cores in minutes.

    python -m aogpt_jax.main --config=configs/quickstart.py --workdir=runs/quickstart
"""

from aogpt_jax import config as config_lib


def get_config():
  config = config_lib.default()
  config.model.vocab_size = 512
  config.model.context_length = 64
  config.model.num_layers = 3
  config.model.num_heads = 4
  config.model.embed_dim = 128
  config.model.position_encoding = 'target_rotary'
  config.model.rotary_base = 100.0
  config.model.init_std = 0.05
  config.model.gate_init = 1.0
  config.model.scan_layers = False  # three layers: unrolled is faster, and compiles soon enough
  config.optimizer.learning_rate = 6e-3
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.995
  config.train.num_steps = 4200
  config.train.batch_size = 8
  config.train.log_every = 100
  config.train.eval_every = 0
  config.train.checkpoint_every = 500
  config.sample.temperature = 0.8
  config.sample.top_p = 0.8
  config.sample.infill = 'Good morrow, my <mask:2>. What news?'
  return config
