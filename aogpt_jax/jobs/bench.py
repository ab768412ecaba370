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
from aogpt_jax.config import Config
from aogpt_jax.jobs import prepare as prepare_job
from aogpt_jax.report import plots, tables

AGAINST_PEER = {'train': training.train, 'generate': generating.generate,
                'evaluate': scoring.evaluate}
ALONE = {'compile': training.compile_, 'attention': training.attention,
         'growth': generating.growth, 'top_p': generating.top_p, 'encoder': generating.encoder}
OF_DATA = {'data': reading.both, 'prepare': reading.prepare}


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
    UserError: if what a peer needs is not installed, or the directory cannot be written.
  """
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
