"""A page in headless Chromium, driven over two pipes: no package, no port, no network."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')
FLAGS = ('--headless=new', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
         '--disable-background-networking', '--disable-component-update', '--disable-sync',
         '--hide-scrollbars', '--remote-debugging-pipe')
# Chromium reads commands from file descriptor 3 and answers on 4.
LAUNCH = ('import fcntl, os, sys; high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) '
          'for fd in sys.argv[1:3]]; os.dup2(high[0], 3); os.dup2(high[1], 4); '
          'os.execvp(sys.argv[3], sys.argv[3:])')
TIMEOUT = 60


class Browser:
  """Chromium with one page, spoken to in the Chrome DevTools Protocol."""

  def __init__(self, binary: str, profile: str):
    read_command, self._commands = os.pipe()
    self._answers, write_answer = os.pipe()
    self._process = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, str(read_command), str(write_answer), binary, *FLAGS,
         f'--user-data-dir={profile}', 'about:blank'], start_new_session=True,
        pass_fds=(read_command, write_answer), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(read_command)
    os.close(write_answer)
    self._buffer, self._last, self._session, self.events = b'', 0, None, []
    pages = self.call('Target.getTargets')['targetInfos']
    target = next(page['targetId'] for page in pages if page['type'] == 'page')
    self._session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self.call(f'{domain}.enable')
    self.call('Emulation.setFocusEmulationEnabled', enabled=True)

  def _read(self) -> dict:
    deadline = time.monotonic() + TIMEOUT
    while b'\0' not in self._buffer:
      ready = select.select([self._answers], [], [], max(0, deadline - time.monotonic()))[0]
      part = os.read(self._answers, 1 << 16) if ready else b''
      if not part:
        raise RuntimeError('Chromium ended, or gave no answer in time')
      self._buffer += part
    message, self._buffer = self._buffer.split(b'\0', 1)
    return json.loads(message)

  def call(self, method: str, **params) -> dict:
    """One command; events that arrive before its answer are kept in `events`."""
    self._last += 1
    command = {'id': self._last, 'method': method, 'params': params}
    if self._session:
      command['sessionId'] = self._session
    os.write(self._commands, json.dumps(command).encode() + b'\0')
    while (message := self._read()).get('id') != self._last:
      self.events.append(message)
    if 'error' in message:
      raise RuntimeError(f'{method}: {message["error"]}')
    return message['result']

  def evaluate(self, script: str):
    """The value of a JavaScript expression."""
    answer = self.call('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
    if 'exceptionDetails' in answer:
      raise RuntimeError(f'{script}: {answer["exceptionDetails"]}')
    return answer['result'].get('value')

  def wait(self, script: str) -> None:
    """Waits until a JavaScript expression is true."""
    deadline = time.monotonic() + TIMEOUT
    while not self.evaluate(script):
      if time.monotonic() > deadline:
        raise RuntimeError(f'never true: {script}')
      time.sleep(0.02)

  def open(self, path, width=1280, height=800, scheme='light', motion='reduce') -> None:
    """Opens a file from disk, as a reader with these settings would."""
    self.call('Emulation.setDeviceMetricsOverride', width=width, height=height,
              deviceScaleFactor=1, mobile=width < 600)
    self.call('Emulation.setEmulatedMedia', features=[
        {'name': 'prefers-color-scheme', 'value': scheme},
        {'name': 'prefers-reduced-motion', 'value': motion}])
    self.call('Page.navigate', url='about:blank')
    self.wait('location.href === "about:blank" && document.readyState === "complete"')
    self.events.clear()
    self.call('Page.navigate', url=path.resolve().as_uri())
    self.wait('location.protocol === "file:" && document.readyState === "complete"')

  def press(self, key: str) -> None:
    """Presses and releases a key, named as in KeyboardEvent.key."""
    text = {'text': key} if len(key) == 1 else {'text': '\r'} if key == 'Enter' else {}
    codes = {'Tab': 9, 'Enter': 13, 'Escape': 27, ' ': 32, 'ArrowLeft': 37, 'ArrowUp': 38,
             'ArrowRight': 39, 'ArrowDown': 40, 'End': 35, 'Home': 36}
    code = {'windowsVirtualKeyCode': codes[key]} if key in codes else {}
    self.call('Input.dispatchKeyEvent', type='keyDown', key=key, **text, **code)
    self.call('Input.dispatchKeyEvent', type='keyUp', key=key, **code)

  def close(self) -> None:
    os.killpg(self._process.pid, signal.SIGKILL)  # its own session: nothing else is in it
    self._process.wait()
    os.close(self._commands)
    os.close(self._answers)


@pytest.fixture(scope='session')
def browser(tmp_path_factory):
  """Headless Chromium; the test is skipped on a machine without one."""
  binary = next(filter(None, map(shutil.which, NAMES)), None)
  if binary is None:
    pytest.skip(f'no browser on this machine: none of {", ".join(NAMES)} is on PATH')
  browser = Browser(binary, str(tmp_path_factory.mktemp('profile')))
  yield browser
  browser.close()
