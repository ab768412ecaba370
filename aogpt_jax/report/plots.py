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
  """Any-order perplexity against the number of context orders, one line a corpus (paper eq. 7).

  Bars are standard errors. Rows of one corpus with left-to-right perplexity add a dashed line.
  """
  figure, axes = _figure()
  for i, corpus in enumerate(dict.fromkeys(row['corpus'] for row in rows)):
    mine = [row for row in rows if row['corpus'] == corpus]
    curve = [row for row in mine if row['num_ensembles']]
    axes.errorbar([row['num_ensembles'] for row in curve], [row['perplexity'] for row in curve],
                  [row['perplexity_error'] for row in curve], marker='o', capsize=3, color=f'C{i}',
                  label=f'{corpus}, any order')
    for row in mine:
      if row['order'] == 'left_to_right':
        axes.axhline(row['perplexity'], linestyle='--', color=f'C{i}',
                     label=f'{corpus}, left to right')
  sizes = sorted({row['num_ensembles'] for row in rows if row['num_ensembles']})
  axes.set_xscale('log', base=2)
  axes.set_xticks(sizes, map(str, sizes))
  axes.set(xlabel='context orders M', ylabel='perplexity per token', title=title)
  axes.legend()
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
  both[0].legend()
  figure.suptitle(title)
  _save(figure, path)
