"""Benchmarks that cannot flatter: both sides of every ratio run in turn, in one process.

  measure.py      timing in turn, ratios, and the machine's own matmul peak
  machine.py      what the numbers were measured on
  results.py      tables on the terminal and in files
  peers.py        the other side: GPT-2 of Hugging Face, the only user of PyTorch here
  training.py     suites train, attention, compile
  generating.py   suites generate, growth, top_p, samplers, encoder
  scoring.py      suite evaluate
  reading.py      suites data, prepare
"""
