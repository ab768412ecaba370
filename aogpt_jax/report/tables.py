"""Results as Markdown, JSON and CSV. A result is a dict of plain values; nan is written as –."""

import csv
import json
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from aogpt_jax.errors import UserError

# Columns of results: header and format.
FORMATS = {
    'corpus': ('corpus', '{}'), 'order': ('order', '{}'), 'num_ensembles': ('M', '{}'),
    'nats_per_token': ('nats/token', '{:.4f}'),
    'error_over_orders': ('± over orders', '{:.4f}'),
    'error_over_positions': ('± over steps', '{:.4f}'),
    'error_over_blocks': ('± over blocks', '{:.4f}'),
    'gain': ('gain over M = 1', '{:.4f}'), 'gain_error': ('±', '{:.4f}'),
    'perplexity': ('perplexity', '{:.2f}'), 'perplexity_error': ('±', '{:.2f}'),
    'perplexity_per_word': ('per word', '{:.6g}'), 'bits_per_byte': ('bits/byte', '{:.4f}'),
    'num_draws': ('draws', '{}'), 'num_blocks': ('blocks', '{:,}'),
    'num_tokens': ('tokens', '{:,}'), 'context_length': ('context', '{:,}'),
    'items': ('items computed', '{:,}'), 'of_full_forwards': ('of n·M forwards', '{:.4f}'),
    'of_exact': ('of all prefixes', '{:.4f}'),
    'steps': ('steps', '{}'), 'top_p': ('top-p', '{}'), 'temperature': ('temperature', '{}'),
    'entropy': ('token entropy', '{:.3f}'), 'entropy_error': ('±', '{:.3f}'),
    'distinct_1': ('distinct-1', '{:.3f}'), 'distinct_2': ('distinct-2', '{:.3f}'),
    'distinct_3': ('distinct-3', '{:.3f}'), 'repetition': ('repetition', '{:.3f}'),
    'length': ('characters', '{:.0f}'), 'num_texts': ('texts', '{}')}

Row = dict[str, Any]


def _cell(name: str, value: Any) -> str:
  missing = value is None or (isinstance(value, float) and math.isnan(value))
  return '–' if missing else FORMATS[name][1].format(value)


def lines(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """A Markdown table of cells that are text."""
  header = list(header)
  return '\n'.join(f'| {" | ".join(line)} |'
                   for line in [header, ['---'] * len(header), *rows])


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
  """One line a result."""
  return lines((FORMATS[name][0] for name in columns),
               ([_cell(name, row.get(name)) for name in columns] for row in rows))


def grid(rows: Sequence[Row], down: str, across: str, corner: str = '') -> str:
  """Perplexities ± standard error with one result a cell: the layout of the paper's tables.

  Args:
    rows: results with `perplexity` and `perplexity_error`.
    down, across: fields whose values name the lines and the columns.
    corner: header of the first column.
  """
  names = lambda field: list(dict.fromkeys(row[field] for row in rows))
  cells = {(row[down], row[across]):
           f'{row["perplexity"]:.2f} ± {_cell("perplexity_error", row["perplexity_error"])}'
           for row in rows}
  return lines([corner, *map(str, names(across))],
               ([str(line), *(cells.get((line, column), '–') for column in names(across))]
                for line in names(down)))


def make_directory(directory: pathlib.Path) -> None:
  """Makes the directory of results; UserError if it cannot be written: before hours of work."""
  try:
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / '.writable'
    probe.touch()
    probe.unlink()
  except OSError as error:
    kind = 'is a file, must be a directory' if directory.is_file() else 'cannot be written'
    raise UserError(f'--output={directory}: {kind}: {error.strerror}') from None


def write(directory: pathlib.Path, name: str, rows: Sequence[Row], about: Row, page: str,
          ) -> None:
  """Writes NAME.md (the page), NAME.json ({**about, 'results': rows}) and NAME.csv.

  Raises:
    UserError: if the directory cannot be written.
  """
  make_directory(directory)
  finite = lambda row: {k: None if isinstance(v, float) and not math.isfinite(v) else v
                        for k, v in row.items()}
  try:
    (directory / f'{name}.md').write_text(page + '\n', 'utf-8')
    (directory / f'{name}.json').write_text(
        json.dumps(about | {'results': [finite(row) for row in rows]}, indent=2) + '\n', 'utf-8')
    with open(directory / f'{name}.csv', 'w', newline='', encoding='utf-8') as file:
      columns = list(dict.fromkeys(key for row in rows for key in row))
      writer = csv.DictWriter(file, columns)
      writer.writeheader()
      writer.writerows(map(finite, rows))
  except OSError as error:
    raise UserError(f'--output={directory}: cannot be written: {error.strerror}') from None
