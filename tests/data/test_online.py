"""The network is asked once, briefly; whatever the host answers counts as an answer."""

import io
import threading
import time
import urllib.error
import urllib.request

import pytest

from aogpt_jax.data import online
from aogpt_jax.errors import UserError


def test_a_host_that_does_not_exist():
  assert not online.reachable('https://no-such-host.invalid')


def test_a_host_that_answers_with_an_error(monkeypatch):
  def refuse(request, timeout):
    raise urllib.error.HTTPError(request.full_url, 403, 'no', {}, io.BytesIO())

  monkeypatch.setattr(urllib.request, 'urlopen', refuse)
  assert online.reachable('https://x.org')


def test_a_host_that_is_silent(monkeypatch):
  """As a name server that drops packets: nothing has a time limit but we."""
  release = threading.Event()

  def hang(request, timeout):
    release.wait()
    raise OSError

  monkeypatch.setattr(urllib.request, 'urlopen', hang)
  monkeypatch.setattr(online, '_PATIENCE', -0.9)
  start = time.monotonic()
  assert not online.reachable('https://x.org')
  assert time.monotonic() - start < 60
  release.set()


def test_a_missing_package_names_its_extra():
  online.require('json', 'x', 'this')
  with pytest.raises(UserError, match=r"this: needs the package no_such; .*'aogpt_jax\[ex\]'"):
    online.require('no_such', 'ex', 'this')
