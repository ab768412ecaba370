"""Quality of generated texts: perplexity under a judge, and what that cannot see.

A judge prefers texts that repeat themselves, so its perplexity means nothing without the entropy,
distinctness and repetition next to it.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aogpt_jax.config import check
from aogpt_jax.data import online
from aogpt_jax.errors import UserError
from aogpt_jax.evaluation.perplexity import standard_error

HF_PREFIX = 'hf:'


class Judgement(NamedTuple):
  """NLL (texts,) float64 nats and number of tokens (texts,) int64 of each text under a judge."""

  nats: np.ndarray
  num_tokens: np.ndarray


Judge = Callable[[Sequence[str]], Judgement]


def run_judge(path: str) -> Judge:
  """Another run of this project as a judge: its left-to-right law (or its own order).

  A text is tokenized by the judge; one longer than its context is cut into windows, each scored on
  its own.
  """
  from aogpt_jax import lm as lm_lib, scoring
  lm = lm_lib.load(path)
  length = lm.model.config.context_length
  name = 'left_to_right' if lm.model.config.knows_target else lm.config.order.name

  def judge(texts):
    rows, owner = [], []
    for i, text in enumerate(texts):
      ids = lm.tokenizer.encode(text)
      for start in range(0, len(ids), length):
        window = ids[start:start + length]
        order = np.asarray(lm.order(name).row(None, len(window)))
        rows.append(scoring.Row(window, order.astype(np.int32), 0, (len(window),)))
        owner.append(i)
    nats, counts = np.zeros(len(texts)), np.zeros(len(texts), int)
    for i, score in zip(owner, scoring.score(lm.model, rows, batch_size=32)):
      nats[i] += score.nats
      counts[i] += score.num_tokens
    return Judgement(nats, counts)
  return judge


def hugging_face_judge(name: str) -> Judge:
  """A causal LM of Hugging Face, by name or path, through PyTorch (the extra `judge`).

  As usual for GPT-2, the first token of a text (or of a window of the judge's context) is given,
  not scored.

  Raises:
    UserError: if transformers or PyTorch is missing, or the model cannot be had.
  """
  try:
    import torch
    import transformers
  except ImportError as error:
    raise UserError(f'--judge={HF_PREFIX}{name}: {error.name} is not installed; '
                    "pip install 'aogpt_jax[judge]', or name a run of this project") from None
  transformers.logging.set_verbosity_error()
  # Without a network transformers would try for a minute; its cache is asked at once.
  offline = not (os.path.isdir(name) or online.reachable('https://huggingface.co'))
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=offline)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        name, local_files_only=offline).eval()
  except (OSError, ValueError) as error:
    raise UserError(f'--judge={HF_PREFIX}{name}: cannot be loaded, neither as a directory nor from '
                    f'the Hub: {str(error).splitlines()[0]}') from None
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  model.to(device)
  length = getattr(model.config, 'max_position_embeddings', 1024)

  @torch.no_grad()
  def window_nats(ids):
    ids = torch.tensor(ids, device=device)[None]
    log_probs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return -log_probs.gather(1, ids[0, 1:, None]).sum().item()

  def judge(texts):
    nats, counts = np.zeros(len(texts)), np.zeros(len(texts), int)
    for i, text in enumerate(texts):
      ids = tokenizer(text, truncation=False)['input_ids']
      for start in range(0, len(ids), length):
        window = ids[start:start + length]
        if len(window) > 1:
          nats[i] += window_nats(window)
          counts[i] += len(window) - 1
    return Judgement(nats, counts)
  return judge


def make_judge(spec: str) -> Judge:
  """`hf:NAME` or `hf:DIRECTORY` of a Hugging Face causal LM, or the path of a run."""
  if spec.startswith(HF_PREFIX):
    return hugging_face_judge(spec.removeprefix(HF_PREFIX))
  try:
    return run_judge(spec)
  except UserError as error:
    raise UserError(f'--judge={spec}: {error} (a Hugging Face model is hf:NAME)') from None


def token_entropy(tokens: np.ndarray) -> float:
  """Entropy in nats of the frequencies of the tokens (n,) of one text."""
  _, counts = np.unique(tokens, return_counts=True)
  share = counts / counts.sum()
  return float(-(share * np.log(share)).sum())


def distinct(tokens: np.ndarray, n: int) -> float:
  """Share of the n-grams of one text (length,) that differ; nan if it has none."""
  grams = list(zip(*(tokens[i:].tolist() for i in range(n))))
  return len(set(grams)) / len(grams) if grams else math.nan


def repetition(tokens: np.ndarray) -> float:
  """Share of the 4-grams of one text that repeat an earlier one; nan if it has none."""
  return 1 - distinct(tokens, 4)


@dataclasses.dataclass(frozen=True)
class Quality:
  """What texts are worth; means over texts, and the standard errors of two of them.

  perplexity: exp of the judge's nats per token over all texts. entropy: nats. length: characters.
  """

  perplexity: float
  perplexity_error: float
  entropy: float
  entropy_error: float
  distinct_1: float
  distinct_2: float
  distinct_3: float
  repetition: float
  length: float
  num_texts: int


def quality(texts: Sequence[str], tokens: Sequence[np.ndarray], judge: Judge) -> Quality:
  """Scores generated texts.

  Args:
    texts: at least two.
    tokens: the generator's ids of each, (n,).
    judge: see `make_judge`.

  Raises:
    UserError: for fewer than two texts, of which there is no standard error, or none with a token.
  """
  check(len(texts) >= 2, 'sample.num_samples', len(texts), 'must be at least 2: a standard error '
        'needs two texts')
  found = judge(texts)
  total = int(found.num_tokens.sum())
  check(total > 0, 'texts', list(texts)[:2], 'the judge finds no token to score in them')
  nats = found.nats.sum() / total
  # Texts differ in length under the judge: the error of a ratio of two sums.
  residual = (found.nats - nats * found.num_tokens) / (total / len(texts))
  entropies = np.array([token_entropy(t) for t in tokens])
  def mean(values):
    known = [v for v in values if not math.isnan(v)]  # a short text has no 3-grams
    return float(np.mean(known)) if known else math.nan

  return Quality(
      math.exp(nats), math.exp(nats) * standard_error(residual), mean(entropies),
      standard_error(entropies), *(mean([distinct(t, n) for t in tokens]) for n in (1, 2, 3)),
      mean([repetition(t) for t in tokens]), mean([len(t) for t in texts]), len(texts))
