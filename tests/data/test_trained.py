"""The tokenizer of a corpus: trained on its beginning, once."""

import pytest

from aogpt_jax.data import corpora, tokenizers, trained
from aogpt_jax.errors import UserError

TEXT = 'The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n'


@pytest.fixture
def text(tmp_path):
  (tmp_path / 'a.txt').write_text(TEXT * 40)
  return tmp_path / 'a.txt'


def test_a_small_corpus_is_used_whole(text, tmp_path):
  corpus = f'files:{text}'
  tokenizer = trained.load_or_train(tmp_path / 'data', corpus, 290)
  expected = tokenizers.train_sentencepiece(corpora.read_documents(corpus), 290)
  assert tokenizer.fingerprint == expected.fingerprint


def test_of_a_large_corpus_only_the_beginning_counts(text, tmp_path, monkeypatch):
  monkeypatch.setattr(trained, 'SAMPLE_CHARACTERS', len(TEXT) * 40 + 100)
  (tmp_path / 'b.txt').write_text('x' * 100 + 'zyxw ' * 1000)
  (tmp_path / 'c.txt').write_text('zyxw ' * 1000)
  first = trained.load_or_train(tmp_path / 'data', f'files:{tmp_path}/?.txt', 290)
  expected = tokenizers.train_sentencepiece([TEXT * 40, 'x' * 100], 290)
  assert first.fingerprint == expected.fingerprint


def test_it_is_trained_once(text, tmp_path, monkeypatch):
  first = trained.load_or_train(tmp_path / 'data', f'files:{text}', 290)
  with monkeypatch.context() as patch:
    patch.setattr(trained.tokenizers, 'train_sentencepiece', None)
    again = trained.load_or_train(tmp_path / 'data', f'files:{text}', 290)
    assert again.fingerprint == first.fingerprint
    with pytest.raises(TypeError):  # another size is trained
      trained.load_or_train(tmp_path / 'data', f'files:{text}', 289)
    text.write_text(TEXT[::-1] * 40)
    with pytest.raises(TypeError):  # and on another text
      trained.load_or_train(tmp_path / 'data', f'files:{text}', 290)


def test_a_damaged_model_is_named(text, tmp_path):
  trained.load_or_train(tmp_path / 'data', f'files:{text}', 290)
  (path,) = (tmp_path / 'data').iterdir()
  path.write_bytes(b'damaged')
  with pytest.raises(UserError, match=f'{path}: not a sentencepiece model'):
    trained.load_or_train(tmp_path / 'data', f'files:{text}', 290)
