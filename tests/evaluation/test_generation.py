"""Quality of texts: numbers by hand, judges, and what a judge cannot see."""

import math

import numpy as np
import pytest

import aogpt_jax
from aogpt_jax.errors import UserError
from aogpt_jax.evaluation import generation
from aogpt_jax.evaluation.generation import Judgement


def test_entropy_distinct_and_repetition_by_hand():
  tokens = np.array([5, 5, 7, 5, 5, 7, 5, 5])
  assert generation.token_entropy(tokens) == pytest.approx(
      -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
  assert generation.distinct(tokens, 1) == pytest.approx(2 / 8)
  assert generation.distinct(tokens, 2) == pytest.approx(3 / 7)  # 55 57 75
  assert generation.repetition(tokens) == pytest.approx(2 / 5)  # 5575 5755 7557 | 5575 5755
  assert math.isnan(generation.distinct(tokens[:2], 3))


def test_quality_by_hand():
  """Perplexity is of all tokens together; its error is that of a ratio of two sums."""
  judge = lambda texts: Judgement(np.array([2.0, 9.0]), np.array([2, 3]))
  found = generation.quality(['ab', 'abcd'], [np.array([1, 1]), np.array([1, 2, 3])], judge)
  assert found.perplexity == pytest.approx(math.exp(11 / 5))
  residual = np.array([2 - 2 * 2.2, 9 - 3 * 2.2]) / 2.5
  assert found.perplexity_error == pytest.approx(
      math.exp(2.2) * np.std(residual, ddof=1) / math.sqrt(2))
  assert found.entropy == pytest.approx(math.log(3) / 2)
  assert found.entropy_error == pytest.approx(math.log(3) / 2)
  assert (found.length, found.num_texts, found.distinct_1) == (3, 2, 0.75)
  with pytest.raises(UserError, match='num_samples=1: must be at least 2'):
    generation.quality(['ab'], [np.array([1])], judge)


def test_a_run_judges_left_to_right_in_windows_of_its_context(text_run):
  """A text of one window is scored as by lm.score; a longer one as its windows."""
  lm = aogpt_jax.load(text_run)
  judge = generation.make_judge(str(text_run))
  long = 'One two three four five six seven eight nine ten.'
  ids = lm.tokenizer.encode(long)
  assert len(ids) > 16
  windows = [lm.tokenizer.decode(ids[i:i + 16]) for i in range(0, len(ids), 16)]
  got = judge(['One two', long, ''])
  assert got.num_tokens.tolist() == [len(lm.tokenizer.encode('One two')), len(ids), 0]
  assert got.nats[0] == pytest.approx(lm.score(['One two'])[0].nats, abs=1e-4)
  assert got.nats[1] == pytest.approx(sum(s.nats for s in lm.score(windows)), abs=1e-3)
  with pytest.raises(UserError, match=r'--judge=nowhere: .*not a run directory.*hf:NAME'):
    generation.make_judge('nowhere')


def test_a_hugging_face_judge(tmp_path):
  """A GPT-2 with random weights, from a directory: the loss that transformers itself computes."""
  transformers = pytest.importorskip('transformers', reason='the extra `judge` is not installed')
  torch = pytest.importorskip('torch')
  tokenizers = pytest.importorskip('tokenizers')
  bpe = tokenizers.ByteLevelBPETokenizer()
  bpe.train_from_iterator(['One two three four five six'] * 3, vocab_size=270)
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
  tokenizer.save_pretrained(tmp_path)
  torch.manual_seed(0)
  model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
      vocab_size=len(tokenizer), n_positions=8, n_embd=16, n_layer=1, n_head=2,
      initializer_range=0.5)).eval()
  model.save_pretrained(tmp_path)
  texts = ['One two', 'One two three four five six One two three']
  got = generation.make_judge(f'hf:{tmp_path}')(texts)
  want, counts = [], []
  for text in texts:
    ids = tokenizer(text)['input_ids']
    windows = [ids[i:i + 8] for i in range(0, len(ids), 8)]
    windows = [torch.tensor(w)[None] for w in windows if len(w) > 1]
    with torch.no_grad():
      want.append(sum(model(w, labels=w).loss.item() * (w.shape[1] - 1) for w in windows))
    counts.append(sum(w.shape[1] - 1 for w in windows))
  assert counts[1] > 8 and got.num_tokens.tolist() == counts
  np.testing.assert_allclose(got.nats, want, rtol=1e-5)
  with pytest.raises(UserError, match='--judge=hf:.*cannot be loaded'):
    generation.make_judge(f'hf:{tmp_path}/none')
