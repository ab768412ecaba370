"""The page that plays a generation: what is written, and what headless Chromium makes of it."""

import json
import random
import re

import numpy as np
import pytest

from aogpt_jax.errors import UserError
from aogpt_jax.report import viewer

ODD = ['Wil', 'liam', '\t', 'naïve', ' ', '  ', '', '👩\u200d🚀', ' שלום', ' עולם', '\n\n', '\r\n',
       '</script><script>window.hacked = 1</script>', '<img src=http://example.org/x>', ' &amp;',
       '<!--', '\u200b', '\u2028', '\0', ' silicovolcanoconiosis' + 'x' * 300, '\n', 'end', '\n']


def _sample(pieces, given=(), steps=4, caption='A caption', seed=0):
  """`pieces` in a random order of `steps` steps; those at `given` are given."""
  rest = [i for i in range(len(pieces)) if i not in given]
  random.Random(seed).shuffle(rest)
  step = [viewer.GIVEN] * len(pieces)
  for turn, i in enumerate(rest):
    step[i] = turn * steps // len(rest)
  return viewer.Sample(pieces, step, [None if s < 0 else 0.125 for s in step],
                       [None if s < 0 else 2 for s in step], caption)


def _given_text(sample):
  return ''.join(piece for piece, step in zip(sample.pieces, sample.step) if step < 0)


def _data(page):
  return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


VERSE = re.findall(r'\n| ?\w+|[^\w\s]', (
    'KING RICHARD:\nWhat, my lord, thou hast not the grace\nTo speak of love when all the world '
    'is war;\nI would have thee be gone, and bid the queen\nPrepare her heart for sorrow.\n') * 2)


def test_the_page_holds_the_samples():
  sample = _sample(ODD, given=(0, 1))
  data = _data(viewer.to_html([sample, _sample(['a'])], title='Odd <b>'))
  assert data['title'] == 'Odd <b>'
  assert data['samples'][0] == dict(sample._asdict())
  assert data['samples'][1]['caption'] == 'A caption'


def test_numpy_numbers_and_long_fractions_are_written_plainly():
  sample = viewer.Sample(['a', 'b'], np.int32([0, 1]), np.float32([0.1, 1 / 3]), np.int64([0, 9]))
  data = _data(viewer.to_html([sample]))['samples'][0]
  assert (data['step'], data['probability'], data['rank']) == ([0, 1], [0.1, 0.3333], [0, 9])


def test_nothing_in_the_samples_or_the_title_becomes_markup():
  page = viewer.to_html([_sample(ODD, caption='</script><i>')], title='{{data}} </title><i>')
  assert page.count('<script') == page.count('</script') == 2
  assert '<i>' not in page and '<img' not in page and '<!--' not in page
  assert '<title>{{data}} &lt;/title&gt;&lt;i&gt;</title>' in page


def test_half_a_surrogate_pair_can_be_written(tmp_path):
  viewer.write_html(tmp_path / 'page.html', [_sample(['\ud83d', 'x'])], title='\ud83d')
  assert _data((tmp_path / 'page.html').read_text())['samples'][0]['pieces'] == ['\ud83d', 'x']


def test_the_page_loads_nothing():
  page = viewer.to_html([_sample(['a'])])
  assert "default-src 'none'" in page
  assert not re.search(r'https?://|@import|url\(|\bsrc=', page)


@pytest.mark.parametrize('change, message', [
    (dict(step=[0]), r'samples\[0\].step: has 1 entries, but samples\[0\].pieces has 2'),
    (dict(probability=[0.5] * 3), r'samples\[0\].probability: has 3 entries'),
    (dict(rank=[]), r'samples\[0\].rank: has 0 entries'),
    (dict(step=[0, -2]), r'samples\[0\].step\[1\]=-2'),
    (dict(probability=[0.5, float('nan')]), r'samples\[0\].probability\[1\]=nan'),
    (dict(probability=[1.5, None]), r'samples\[0\].probability\[0\]=1.5'),
    (dict(rank=[None, -1]), r'samples\[0\].rank\[1\]=-1'),
])
def test_samples_that_make_no_sense_are_refused(tmp_path, change, message):
  sample = _sample(['a', 'b'])._replace(**change)
  with pytest.raises(UserError, match=message):
    viewer.write_html(tmp_path / 'page.html', [sample])
  assert not list(tmp_path.iterdir())


def test_no_samples_are_refused(tmp_path):
  with pytest.raises(UserError, match='samples=.*at least one'):
    viewer.write_html(tmp_path / 'page.html', [])


def test_a_file_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / 'file').write_text('')
  (tmp_path / 'folder').mkdir()
  for path in (tmp_path / 'file' / 'page.html', tmp_path / 'folder'):
    with pytest.raises(UserError, match=f'{path}: cannot be written: '):
      viewer.write_html(path, [_sample(['a'])])
  assert sorted(path.name for path in tmp_path.iterdir()) == ['file', 'folder']


def test_a_failed_write_leaves_the_old_page_and_no_rest(tmp_path, monkeypatch):
  path = tmp_path / 'new' / 'page.html'
  viewer.write_html(path, [_sample(['old'])])
  before = path.read_bytes()

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(viewer.os, 'replace', full)
  with pytest.raises(UserError, match='No space left'):
    viewer.write_html(path, [_sample(['new'])])
  assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


TEXT = 'document.getElementById("text").textContent'
STATUS = 'document.getElementById("status").textContent'
PLAYING = 'document.getElementById("play").textContent === "Pause"'
TIP = 'document.getElementById("tip").hidden ? null : document.getElementById("tip").innerText'
BOXES = ('[...document.querySelectorAll("#text .t")].map(t => t.getBoundingClientRect())'
         '.map(b => [b.left, b.top, b.width])')


def _speed_up(browser):
  browser.evaluate('speed.value = 100; speed.dispatchEvent(new Event("change"))')


@pytest.fixture
def page(browser, tmp_path):
  """Writes samples, opens them, and at the end asserts that nothing went wrong or was fetched."""
  def open_page(*samples, **settings):
    path = tmp_path / 'page.html'
    viewer.write_html(path, samples, title='A title')
    browser.open(path, **settings)
    return browser
  yield open_page
  browser.evaluate('new Promise(done => setTimeout(done, 50))')  # late events
  events = {kind: [event['params'] for event in browser.events if event['method'] == kind]
            for kind in ('Runtime.exceptionThrown', 'Runtime.consoleAPICalled', 'Log.entryAdded',
                         'Network.requestWillBeSent')}
  urls = {request['request']['url'] for request in events.pop('Network.requestWillBeSent')}
  assert urls == {(tmp_path / 'page.html').as_uri()}
  assert not any(events.values()), events


def test_it_plays_from_the_given_tokens_to_the_exact_text(page):
  sample = _sample(ODD, given=(0, 1, 14))
  browser = page(sample, motion='no-preference')
  _speed_up(browser)
  browser.wait(f'{STATUS}.startsWith("Step 4 / 4") && !({PLAYING})')  # played by itself
  assert browser.evaluate(TEXT) == ''.join(sample.pieces)
  browser.press('Home')
  assert browser.evaluate(TEXT) == _given_text(sample)
  assert browser.evaluate(STATUS) == 'Step 0 / 4 · 0 / 20 tokens · 3 given'
  browser.press(' ')
  assert browser.evaluate(PLAYING)
  browser.wait(f'{STATUS}.startsWith("Step 4 / 4")')
  assert browser.evaluate('[window.hacked, document.images.length]') == [None, 0]


def test_each_step_shows_the_tokens_revealed_so_far_and_marks_the_new(page):
  sample = _sample(VERSE, steps=7)
  browser = page(sample)
  for k in [*range(1, 8), *range(6, -1, -1)]:
    browser.press('ArrowRight' if k > int(browser.evaluate('slider.value')) else 'ArrowLeft')
    shown = ''.join(piece for piece, step in zip(sample.pieces, sample.step) if step < k)
    assert browser.evaluate(TEXT) == shown
    assert browser.evaluate('document.querySelectorAll("#text .new").length') == sum(
        step == k - 1 for step in sample.step)


def test_nothing_moves_when_tokens_appear(page):
  browser = page(_sample(VERSE, steps=5), width=390, height=844)
  start = np.array(browser.evaluate(BOXES))
  for key in ('ArrowRight', 'ArrowRight', 'End'):
    browser.press(key)
    np.testing.assert_allclose(browser.evaluate(BOXES), start, atol=0.5)


def test_the_keyboard_reaches_everything(page):
  samples = [_sample(list('abcd'), caption=str(i)) for i in range(3)]
  browser = page(*samples)
  assert not browser.evaluate(PLAYING)  # the reader wants less motion
  caption = 'document.getElementById("caption").textContent'
  seen = []
  for key in ('n', ']', 'N', 'p', '[', 'p'):
    browser.press(key)
    seen.append(browser.evaluate(caption))
  assert seen == ['1', '2', '2', '1', '0', '0']
  browser.press('End')
  browser.press('n')
  assert browser.evaluate(TEXT) == 'abcd'  # whole texts can be leafed through
  browser.press('Home')
  browser.press('Tab')  # to the play button, which the space bar presses
  assert browser.evaluate('document.activeElement.id') == 'play'
  browser.press(' ')
  assert browser.evaluate(PLAYING)
  browser.press(' ')
  assert not browser.evaluate(PLAYING)
  reached = []
  for _ in range(8):
    reached.append(browser.evaluate('document.activeElement.id'))
    assert browser.evaluate('getComputedStyle(document.activeElement).outlineStyle') == 'solid'
    browser.press('Tab')
  assert reached == ['play', 'restart', 'speed', 'slider', 'previous', 'sample', 'next', 'text']


def test_a_token_tells_its_step_probability_and_rank(page):
  sample = viewer.Sample(['Go', ' on', '\n', '!'], [-1, 0, 1, 1], [None, 0.123, 1e-5, None],
                         [None, 0, 41, None])
  browser = page(sample)
  browser.press('ArrowRight')
  browser.evaluate('document.getElementById("text").focus()')
  tips = []
  for _ in range(3):
    browser.press('ArrowDown')
    tips.append(browser.evaluate(TIP))
  assert [re.sub('[\u2068\u2069]', '', tip) for tip in tips] == [
      'Go\nGiven', '␣on\nStep 1 of 2\nProbability 12.3 %\nRank #1, the most probable',
      'Not yet revealed: comes in step 2 of 2']
  browser.press('ArrowRight')
  assert 'Step 2 of 2\nProbability 0.0010 %\nRank #42' in browser.evaluate(TIP)
  browser.press('Escape')
  assert browser.evaluate(TIP) is None


def test_the_pointer_and_a_tap_show_a_token(page):
  browser = page(_sample(['Go', ' on']))
  browser.press('End')
  x, y, width = browser.evaluate(BOXES)[0]
  browser.call('Input.dispatchMouseEvent', type='mouseMoved', x=x + width / 2, y=y + 8)
  assert 'Probability 12.5 %\nRank #3' in browser.evaluate(TIP)
  browser.call('Input.dispatchMouseEvent', type='mouseMoved', x=2, y=2)
  assert browser.evaluate(TIP) is None
  browser.call('Input.dispatchTouchEvent', type='touchStart',
               touchPoints=[{'x': x + width / 2, 'y': y + 8}])
  browser.call('Input.dispatchTouchEvent', type='touchEnd', touchPoints=[])
  browser.wait(f'({TIP}) !== null')


def test_buttons_slider_and_selects(page):
  browser = page(_sample(list('abcd')), _sample(list('efgh')))
  browser.evaluate('slider.value = 3; slider.dispatchEvent(new Event("input"))')
  assert browser.evaluate(STATUS) == 'Step 3 / 4 · 3 / 4 tokens'
  assert browser.evaluate('slider.getAttribute("aria-valuetext")') == 'Step 3 / 4 · 3 / 4 tokens'
  _speed_up(browser)
  browser.evaluate('document.getElementById("restart").click()')
  browser.wait(f'{STATUS}.startsWith("Step 4") && !({PLAYING})')
  browser.evaluate('document.getElementById("next").click()')
  assert browser.evaluate(TEXT) == 'efgh'
  assert browser.evaluate('[next.disabled, previous.disabled]') == [True, False]


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_every_text_has_contrast(page, scheme):
  browser = page(_sample([' it', 'is', '\n'], given=(1,))._replace(step=[0, -1, 1]), scheme=scheme)
  browser.press('ArrowRight')
  worst = browser.evaluate('''(() => {
    const context = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const light = color => {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = color;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
      if (!a) return null;
      const [x, y, z] = [r, g, b].map(c => c / 255)
          .map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
      return .2126 * x + .7152 * y + .0722 * z;
    };
    const behind = e => light(getComputedStyle(e).backgroundColor) ?? behind(e.parentElement);
    const contrast = (e, part) => {
      const pair = [light(getComputedStyle(e, part).color), behind(e)].sort((a, b) => b - a);
      return (pair[0] + .05) / (pair[1] + .05);
    };
    const results = [];
    for (const e of document.querySelectorAll('body *:not(script):not(noscript)'))
      if (!e.disabled && e.textContent) results.push([contrast(e), e.outerHTML.slice(0, 80)]);
    const mark = document.querySelector('#text .blank.seen');
    results.push([contrast(mark, '::before'), 'mark of a hidden newline']);
    const token = document.querySelector('#text .shown');
    token.style.transition = 'none';
    for (let s = 0; s <= 1; s += .02) {
      token.style.setProperty('--s', s);
      results.push([contrast(token), `token, --s: ${s}`]);
    }
    return results.sort((a, b) => a[0] - b[0])[0];
  })()''')
  assert worst[0] >= 4.5, worst


@pytest.mark.parametrize('width', [390, 1280])
def test_nothing_overflows(page, width):
  browser = page(_sample(ODD, caption='c' * 500), _sample([' ' * 500, '\t' * 99]), width=width)
  for key in ('ArrowRight', 'End'):  # long words are wrapped, not cut
    assert browser.evaluate('text.scrollWidth <= text.clientWidth')
    assert browser.evaluate('document.documentElement.scrollWidth <= innerWidth')
    browser.press(key)
  assert browser.evaluate('text.scrollWidth <= text.clientWidth')
  for key in ('n', 'Home', 'End'):
    browser.press(key)
    assert browser.evaluate('document.documentElement.scrollWidth <= innerWidth')


def test_a_thousand_steps_stay_quick(page):
  pieces = [random.Random(i).choice(VERSE) for i in range(1024)]
  browser = page(*[_sample(pieces, steps=1024, seed=i) for i in range(16)])
  milliseconds = browser.evaluate('''(() => {
    const start = performance.now();
    for (let k = 0; k < 100; k++) { seek(500 + k); document.body.offsetHeight; }
    return (performance.now() - start) / 101;
  })()''')
  assert milliseconds < 100  # 15 where this was written
  changed = browser.evaluate('''new Promise(done => {
    const records = [];
    const observer = new MutationObserver(list => records.push(...list.map(r => r.target)));
    observer.observe(document.getElementById('text'), {attributes: true, subtree: true});
    seek(at + 1);
    setTimeout(() => done(new Set(records).size), 0);
  })''')
  assert changed <= 2  # the new token, and the one that was new


def test_one_sample_needs_no_choice(page):
  browser = page(viewer.Sample(['all', ' given'], [-1, -1], [None] * 2, [None] * 2))
  assert browser.evaluate(TEXT) == 'all given'
  assert browser.evaluate('document.getElementById("samples").offsetHeight') == 0
  assert browser.evaluate(STATUS) == 'Step 0 / 0 · 0 / 0 tokens · 2 given'
