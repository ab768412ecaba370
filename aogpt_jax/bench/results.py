"""Tables of a benchmark: on the terminal as Markdown, in files as Markdown, JSON and CSV."""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aogpt_jax.report import tables

Row = tables.Row


class Table(NamedTuple):
  """title: one sentence. columns: names in COLUMNS. rows: plain values. notes: what to know."""

  title: str
  columns: tuple[str, ...]
  rows: list[Row]
  notes: tuple[str, ...] = ()


def number(value: float) -> str:
  """Three digits, or all before the point."""
  return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'


_integer = '{:,}'.format
_percent = '{:.1%}'.format
_engineering = '{:.4g}'.format
_giga = lambda value: number(value / 1e9)
_mega = lambda value: number(value / 1e6)
_milli = lambda value: number(value * 1e3)

# Header and format of a column; a field NAME_low and NAME_high beside NAME is its range.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    'name': ('', str), 'model': ('model', str), 'sampler': ('sampler', str),
    'length': ('tokens', _integer), 'steps': ('steps', _integer), 'batch': ('rows', _integer),
    'layers': ('layers', _integer), 'parameters': ('parameters', _integer),
    'runs': ('timed runs', _integer), 'processes': ('processes that tokenize', _integer),
    'seconds': ('seconds', number),
    'first_seconds': ('first call, s', number), 'later_seconds': ('a later call, s', number),
    'trace_seconds': ('traced, s', number), 'compile_seconds': ('compiled, s', number),
    'tokens_per_second': ('tokens/s', number), 'bytes_per_second': ('MB/s', _mega),
    'flops_per_token': ('FLOPs a token', _engineering),
    'flops_per_second': ('GFLOP/s', _giga), 'share': ('of the peak', _percent),
    'to_peer': ('tokens/s, this / Hugging Face', number),
    'to_sequential': ('sequential / this', number), 'to_step': ('tokens/s, this / step', number),
    'to_plain_loop': ('plain loop / this', number),
    'items': ('items', _integer), 'padding': ('padding', _integer),
    'seconds_growth': ('seconds / line before', number),
    'items_growth': ('items / line before', number),
    'share_of_rule': ('of it spent on top-p', _percent),
    'calls_per_token': ('calls a token', '{:.3f}'.format),
    'most_calls': ('most calls of a text', _integer),
    'accepted': ('drafts accepted', '{:.2f}'.format),
    'decoder_items': ('decoder items', _integer), 'encoder_items': ('encoder items', _integer),
    'decoder_seconds': ('decoder, s', number), 'encoder_seconds': ('encoder, s', number),
    'encoder_runs': ('encoder runs', _integer), 'to_decoder': ('encoder / decoder', number),
    'dense_seconds': ('dense, ms', _milli), 'blocked_seconds': ('blocked, ms', _milli),
    'to_blocked': ('dense / blocked', number),
    'attention': ('attention', str), 'remat': ('remat', str), 'logits': ('logits', str),
    'temporary_bytes': ('temporary, GB', _giga),
    'all_bytes': ('with arguments, GB', _giga),
    'temporary_share': ('temporary, of full', _percent),
    'all_share': ('with arguments, of full', _percent),
    'num_ensembles': ('M', _integer), 'of_full_forwards': ('of n·M forward passes',
                                                           '{:.4f}'.format)}


def _cell(row: Row, name: str) -> str:
  value, form = row.get(name), COLUMNS[name][1]
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return '–'
  low, high = row.get(f'{name}_low'), row.get(f'{name}_high')
  return form(value) if low is None else f'{form(value)} ({form(low)}–{form(high)})'


def markdown(table: Table) -> str:
  """Title, table and notes."""
  lines = tables.lines((COLUMNS[name][0] for name in table.columns),
                       ([_cell(row, name) for name in table.columns] for row in table.rows))
  return '\n\n'.join([table.title, lines, *table.notes])


def write(directory: pathlib.Path, suite: str, found: Sequence[Table], about: Row, header: str,
          ) -> None:
  """Writes bench_SUITE.md, .json and .csv; a row says in `table` which one it is of.

  Raises:
    UserError: if the directory cannot be written.
  """
  rows = [{'table': table.title, **row} for table in found for row in table.rows]
  notes = {table.title: list(table.notes) for table in found}
  page = '\n\n'.join([f'# {suite}', header, *map(markdown, found)])
  tables.write(directory, f'bench_{suite}', rows, about | {'suite': suite, 'notes': notes}, page)
