"""Plots as PNG files."""

import pathlib
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def _figure():
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot as plt
  figure, axes = plt.subplots(figsize=(6.4, 4.2), layout='constrained')
  axes.grid(alpha=0.3)
  axes.spines[['top', 'right']].set_visible(False)
  return figure, axes


def _save(figure: Any, path: pathlib.Path) -> None:
  from matplotlib import pyplot as plt
  figure.savefig(path, dpi=150)
  plt.close(figure)


def ensemble_curve(path: pathlib.Path, rows: Sequence[Row], title: str) -> None:
  """What the number of context orders gains in nats per token, one line a corpus (paper eq. 7).

  The gain, and not the perplexity: corpora differ in that by far more than ensembles do, and the
  choice of blocks moves a whole curve. Bars are standard errors of the gain.
  """
  figure, axes = _figure()
  for corpus in dict.fromkeys(row['corpus'] for row in rows):
    curve = [row for row in rows if row['corpus'] == corpus]
    axes.errorbar([row['num_ensembles'] for row in curve], [row['gain'] for row in curve],
                  [row['gain_error'] for row in curve], marker='o', capsize=3,
                  label=f'{corpus}: perplexity {curve[0]["perplexity"]:.2f} → '
                        f'{curve[-1]["perplexity"]:.2f}')
  sizes = sorted({row['num_ensembles'] for row in rows})
  axes.set_xscale('log', base=2)
  axes.set_xticks(sizes, map(str, sizes))
  axes.set(xlabel='context orders M', ylabel='gain over M = 1 (nats per token)', title=title)
  figure.legend(loc='outside lower center')
  _save(figure, path)


def generation_grid(path: pathlib.Path, rows: Sequence[Row], title: str) -> None:
  """Generation perplexity (log scale) and token entropy against steps, one line a decoding."""
  import matplotlib
  matplotlib.use('Agg')
  from matplotlib import pyplot as plt
  figure, both = plt.subplots(1, 2, figsize=(9.6, 4.2), layout='constrained')
  for name, label, axes in (('perplexity', 'perplexity under the judge', both[0]),
                            ('entropy', 'token entropy (nats)', both[1])):
    for decoding in dict.fromkeys(row['decoding'] for row in rows):
      mine = [row for row in rows if row['decoding'] == decoding]
      axes.errorbar([row['steps'] for row in mine], [row[name] for row in mine],
                    [row[f'{name}_error'] for row in mine], marker='o', capsize=3, label=decoding)
    steps = sorted({row['steps'] for row in rows})
    axes.set_xscale('log', base=2)
    axes.set_xticks(steps, map(str, steps))
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.set(xlabel='steps', ylabel=label)
  both[0].set_yscale('log')
  _plain_ticks(both[0].yaxis)
  both[0].legend()
  figure.suptitle(title)
  _save(figure, path)


def _plain_ticks(axis: Any) -> None:
  """0.2 and 30 on a logarithmic axis, not powers of ten."""
  from matplotlib import ticker
  for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
    set_formatter(ticker.FuncFormatter(lambda value, _: f'{value:g}'))


def seconds_by_steps(path: pathlib.Path, rows: Sequence[Row], title: str) -> None:
  """Seconds of generation against steps, both logarithmic: decoder and encoder (paper Figure 4)."""
  from matplotlib import ticker
  figure, axes = _figure()
  steps = [row['steps'] for row in rows]
  for name in ('decoder', 'encoder'):
    seconds, low, high = ([row[f'{name}_seconds{end}'] for row in rows]
                          for end in ('', '_low', '_high'))
    bars = [[s - a for s, a in zip(seconds, low)], [b - s for s, b in zip(seconds, high)]]
    line = axes.errorbar(steps, seconds, bars, marker='o', capsize=3)
    axes.annotate(name, (steps[-1], seconds[-1]), (8, 0), textcoords='offset points',
                  color=line[0].get_color(), va='center')
  axes.set_xscale('log', base=2)
  axes.set_yscale('log')
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f'{value:g}'))
  axes.yaxis.set_minor_formatter(ticker.NullFormatter())
  axes.set_xticks(steps, map(str, steps))
  axes.set(xlabel='steps', ylabel='seconds', title=title)
  _save(figure, path)
