"""--mode=sample and --mode=infill as a user runs them: text, JSON lines, a page, mistakes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from aogpt_jax.errors import UserError
from aogpt_jax.jobs import inputs

ROOT = pathlib.Path(__file__).parents[2]

def main(text_run, *args, stdin=''):
  """The command line on that run."""
  env = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  command = [sys.executable, '-m', 'aogpt_jax.main', '--config=configs/quickstart.py',
             f'--workdir={text_run}', '--config.sample.num_samples=1', *args]
  return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
                        input=stdin)


def test_lines_from_stdin_become_json_lines(text_run):
  """One record a line: text, tokens, order, and step, log-probability and rank of each token."""
  templates = ['One <mask:2> three', json.dumps('two\n<mask>'), '', 'no hole']
  result = main(text_run, '--mode=infill', '--input=-', stdin='\n'.join(templates))
  assert result.returncode == 0, result.stderr
  records = [json.loads(line) for line in result.stdout.splitlines()]
  assert [r['text'][:4] for r in records] == ['One ', 'two\n', 'no h']
  first = records[0]
  holes = [i for i, step in enumerate(first['step']) if step is not None]
  assert sorted(first['order']) == holes and len(holes) == 2
  assert [first['step'][i] for i in first['order']] == [0, 1]
  for name in ('log_prob', 'rank'):
    assert [i for i, value in enumerate(first[name]) if value is not None] == holes
  assert all(p < 0 for p in first['log_prob'] if p is not None)
  assert records[2]['order'] == [] and set(records[2]['step']) == {None}


def test_a_text_a_file_and_a_page(text_run, tmp_path):
  """--text prints; --output and --html write; samplers by name."""
  page, lines = tmp_path / 'out.html', tmp_path / 'out.jsonl'
  result = main(text_run, '--mode=infill', '--text=One <mask:3> ten', f'--html={page}',
                '--sampler=adaptive')
  assert result.returncode == 0, result.stderr
  filled = result.stdout.split('--- 1\n')[1].split('\n---')[0]
  assert filled.startswith('One ') and filled.endswith(' ten')
  assert 'adaptive by confidence' in page.read_text() and '<script' in page.read_text()
  result = main(text_run, '--mode=sample', f'--output={lines}', '--config.sample.steps=4')
  assert result.returncode == 0, result.stderr
  (record,) = map(json.loads, lines.read_text().splitlines())
  assert len(record['tokens']) == 16 and set(record['step']) == {0, 1, 2, 3}
  np.testing.assert_array_equal(np.sort(record['order']), np.arange(16))


@pytest.mark.parametrize(('args', 'message'), [
    ([], '--text or --input is needed'), (['--text=a', '--input=-'], 'and not both'),
    (['--text='], '--text: template='),
    (['--text=<mask:99>'], 'a hole is <mask:k> with k in 1..16'),
    (['--input=none.txt'], '--input=none.txt: cannot be read: No such file'),
    (['--text=<mask>', '--sampler=fast'], "sample.sampler='fast': not one of"),
    (['--text=<mask>', '--html=no/dir/x.html'], '--html=no/dir/x.html: must be a file in a'),
    (['--text=<mask>', '--html=-'], '--html=-: must be the name of a file'),
    (['--text=a', '--output=x', '--html=./x'], '--output and --html: must be different files'),
    (['--text=One', 'two'], "unexpected arguments ['two']; a value with spaces needs quotes"),
    (['--text=a', '--output=/dev/full'], '--output=/dev/full: cannot be written: No space'),
    (['--text=<mask>', '--overwrite'], '--overwrite is not used by --mode=infill')])
def test_mistakes_are_one_line(text_run, args, message):
  result = main(text_run, '--mode=infill', *args)
  assert result.returncode == 2 and result.stdout == ''
  (line,) = [line for line in result.stderr.splitlines() if line.startswith('error: ')]
  assert message in line and 'Traceback' not in result.stderr


@pytest.mark.slow
def test_bench_prints_both_sides(text_run, tmp_path):
  """Calls, acceptance and times of the samplers; items of a decoder and an encoder, and a plot."""
  small = ('--mode=bench', '--config.sample.num_samples=2', '--config.sample.steps=4')
  result = main(text_run, *small)
  assert result.returncode == 0, result.stderr
  rows = [line.split('|') for line in result.stdout.splitlines() if line.startswith('| s')]
  assert [row[1].strip() for row in rows][1:3] == ['sequential', 'speculative T, window 2']
  assert all(0 < float(row[2]) <= 1 for row in rows[1:]) and rows[1][6].split()[0] == '1'
  result = main(text_run, *small, '--suite=encoder', '--config.model.context_length=16',
                f'--output={tmp_path}')
  assert result.returncode == 0, result.stderr
  # Steps; items of 2 rows, 16 copies and 9 caught up each; padding up to 4 x 7; the encoder's.
  assert '| 4 | 50 | 6 | 128 |' in result.stdout
  assert (tmp_path / 'bench_encoder.png').read_bytes().startswith(b'\x89PNG')


def test_files_of_templates(tmp_path):
  """Quoted lines are JSON strings; the line of a bad one is named."""
  path = tmp_path / 'templates.txt'
  path.write_text('a <mask>\r\n\n"b\\n<mask>"\n')
  assert inputs.read(None, str(path), 'infill', 'a template') == ['a <mask>', 'b\n<mask>']
  path.write_text('a\n"b\n')
  with pytest.raises(UserError, match='line 2 starts with a quote but is no JSON string'):
    inputs.read(None, str(path), 'infill', 'a template')
  path.write_text('\n\n')
  with pytest.raises(UserError, match='holds no text'):
    inputs.read(None, str(path), 'infill', 'a template')
