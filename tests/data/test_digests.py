"""A digest is remembered only for the bytes that it is of."""

import hashlib
import json
import os

import pytest

from aogpt_jax.data import digests
from aogpt_jax.errors import UserError


@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(digests, '_REMEMBER_FROM', 0)
  return tmp_path / 'cache' / 'aogpt_jax' / 'digests.json'


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'a.txt'
  write(path, 'one', 1000)
  return path


def write(path, text, changed):
  path.write_text(text)
  os.utime(path, (changed, changed))


def digest(text):
  return hashlib.sha256(text.encode()).digest()


def test_it_is_remembered_for_path_size_and_time(cache, path, monkeypatch):
  assert digests.file_digests([path]) == [digest('one')]
  assert json.loads(cache.read_text()) == {str(path): [3, 1000 * 10**9, digest('one').hex()]}
  assert [file.name for file in cache.parent.iterdir()] == ['digests.json']
  write(path, 'two', 1000)  # nothing that the key holds has changed
  monkeypatch.chdir(path.parent)
  assert digests.file_digests(['a.txt']) == [digest('one')]
  for text, changed in (('two', 1001), ('four', 1001)):
    write(path, text, changed)
    assert digests.file_digests([path]) == [digest(text)]


def test_a_file_that_changed_just_now_is_not_remembered(cache, path):
  os.utime(path)
  assert digests.file_digests([path]) == [digest('one')]
  assert not cache.exists()


def test_a_file_that_changes_while_it_is_read_is_not_remembered(cache, path, monkeypatch):
  def append(file, name):
    write(path, 'one, two', 1000)
    return hashlib.sha256(b'one')

  monkeypatch.setattr(digests.hashlib, 'file_digest', append)
  digests.file_digests([path])
  assert not cache.exists()


def test_small_files_are_not_remembered(cache, path, monkeypatch):
  monkeypatch.setattr(digests, '_REMEMBER_FROM', 4)
  digests.file_digests([path])
  assert not cache.exists()


@pytest.mark.parametrize('content', ['', '[]', '{', '{"PATH": 3}', '{"PATH": [3, TIME, "zz"]}',
                                     '{"PATH": [3, TIME, 5]}', '{"PATH": []}'])
def test_a_damaged_cache_is_written_anew(cache, path, content):
  cache.parent.mkdir(parents=True)
  cache.write_text(content.replace('PATH', str(path)).replace('TIME', str(1000 * 10**9)))
  assert digests.file_digests([path]) == [digest('one')]
  assert json.loads(cache.read_text())[str(path)][2] == digest('one').hex()


def test_a_cache_that_cannot_be_written(tmp_path, path, monkeypatch):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  monkeypatch.setattr(digests, '_REMEMBER_FROM', 0)
  assert digests.file_digests([path, path]) == [digest('one')] * 2


def test_a_missing_file(cache, tmp_path):
  with pytest.raises(UserError, match=f'{tmp_path}/no.txt: cannot be read: No such file'):
    digests.file_digests([tmp_path / 'no.txt'])
