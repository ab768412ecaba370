"""--mode=bench: what training, generating, scoring and reading cost, see `aogpt_jax.bench`.

Suites: `train`, `generate` and `evaluate` against GPT-2 of Hugging Face; `data`, the loader against
the step, and `prepare` alone; `compile`, compile time and memory; `growth`, `top_p`, generation by
length and by rule; `encoder`, a decoder against the masked encoder (paper Figure 4); `samplers`, a
trained run through sequential and speculative sampling; `attention`, dense against blocked.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from aogpt_jax import lm as lm_lib
from aogpt_jax.bench import generating, machine, peers, reading, results, scoring, training
from aogpt_jax.config import Config, check
from aogpt_jax.jobs import prepare as prepare_job
from aogpt_jax.report import plots, tables

AGAINST_PEER = {'train': training.train, 'generate': generating.generate,
                'evaluate': scoring.evaluate}
ALONE = {'compile': training.compile_, 'attention': training.attention,
         'growth': generating.growth, 'top_p': generating.top_p, 'encoder': generating.encoder}
OF_GENERATION = ('generate', 'growth', 'top_p', 'encoder')
OF_DATA = {'data': reading.both, 'prepare': reading.prepare}


def _check(config: Config, suite: str) -> None:
  """Raises UserError if a suite that generates cannot, or would compare what it does not say."""
  if suite not in OF_GENERATION:
    return
  model, samples = config.model, config.sample.num_samples
  check(samples >= 1, 'sample.num_samples', samples, 'must be at least 1: they are one batch')
  check(model.context_length >= 2, 'model.context_length', model.context_length,
        'must be at least 2: GPT-2 is given its first token')
  check(model.architecture == 'decoder', 'model.architecture', model.architecture,
        "must be 'decoder': suites that generate measure it, and make the other side")
  check(model.knows_target, 'model.target_injection', model.target_injection,
        'must tell the model its target: texts are generated in uniform orders')


def _tables(config: Config, workdir: pathlib.Path, suite: str, peer: str,
            ) -> Iterator[results.Table]:
  if suite in AGAINST_PEER:
    yield from AGAINST_PEER[suite](config, peer)
  elif suite in ALONE:
    yield from ALONE[suite](config)
  elif suite in OF_DATA:
    with tempfile.TemporaryDirectory(prefix='aogpt-bench-') as folder:
      tokenizer = prepare_job.tokenizer(config, pathlib.Path(folder))
      yield from OF_DATA[suite](config, pathlib.Path(folder), tokenizer)
  else:
    yield from generating.samplers(lm_lib.load(workdir), config)


def run(config: Config, workdir: pathlib.Path, suite: str, peer: str = 'gpt2',
        output: pathlib.Path | None = None) -> None:
  """Prints the machine and the tables of one suite, and writes them.

  Args:
    config: sizes of everything.
    workdir: the run, for `samplers` alone.
    suite: see above.
    peer: 'gpt2', or 'none' for users without PyTorch.
    output: directory of bench_SUITE.md, .json and .csv (and .png for `encoder`); None: none.

  Raises:
    UserError: if what a peer needs is not installed, the directory cannot be written, or the config
      is none for the suite.
  """
  _check(config, suite)
  load = machine.load()
  other = suite in AGAINST_PEER and peer != 'none'
  if other:
    peers.check()
  if output:
    tables.make_directory(output)
  about = machine.describe(load, peers.describe() if other else None)
  about['config'] = dataclasses.asdict(config)
  header, found = machine.header(about), []
  print(header + '\n', flush=True)
  for table in _tables(config, workdir, suite, peer):
    print(results.markdown(table) + '\n', flush=True)
    found.append(table)
    if output:  # after every table: a suite that is interrupted keeps what it has
      results.write(output, suite, found, about, header)
  if output and suite == 'encoder':
    plots.seconds_by_steps(output / 'bench_encoder.png', found[0].rows,
                           found[0].title.split(', ')[0])
  if output:
    print(f'Written to {output}/')
