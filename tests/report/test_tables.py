"""Results as Markdown, JSON and CSV."""

import csv
import json
import math

import pytest

from aogpt_jax.errors import UserError
from aogpt_jax.report import tables

ROWS = [
    {'corpus': 'a', 'order': 'l', 'perplexity': 2.5, 'perplexity_error': 0.125, 'num_tokens': 1234},
    {'corpus': 'b', 'order': 'l', 'perplexity': 3.0, 'perplexity_error': math.nan, 'num_tokens': 5},
    {'corpus': 'b', 'order': 'u', 'perplexity': 4.0, 'perplexity_error': 0.5, 'num_tokens': 5}]


def test_markdown_has_a_line_a_result():
  assert tables.markdown(ROWS[:2], ['corpus', 'num_tokens', 'perplexity_error']).splitlines() == [
      '| corpus | tokens | ± |', '| --- | --- | --- |', '| a | 1,234 | 0.12 |', '| b | 5 | – |']


def test_grid_has_a_cell_a_result():
  assert tables.grid(ROWS, 'order', 'corpus', 'order').splitlines() == [
      '| order | a | b |', '| --- | --- | --- |', '| l | 2.50 ± 0.12 | 3.00 ± – |',
      '| u | – | 4.00 ± 0.50 |']


def test_files_hold_every_number(tmp_path):
  """Unrounded; what is not a number is null, or an empty field."""
  tables.write(tmp_path / 'new', 'x', ROWS, {'step': 3}, 'page')
  assert (tmp_path / 'new' / 'x.md').read_text() == 'page\n'
  found = json.loads((tmp_path / 'new' / 'x.json').read_text())
  assert found['step'] == 3 and found['results'][1]['perplexity_error'] is None
  assert found['results'][0] == ROWS[0]
  with open(tmp_path / 'new' / 'x.csv', newline='') as file:
    lines = list(csv.DictReader(file))
  assert float(lines[0]['perplexity_error']) == 0.125 and lines[1]['perplexity_error'] == ''
  (tmp_path / 'file').touch()
  with pytest.raises(UserError, match='--output=.*file: is a file, must be a directory'):
    tables.write(tmp_path / 'file', 'x', ROWS, {}, 'page')
