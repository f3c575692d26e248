"""Log-likelihoods of answers, and the scores that follow from them.

B rows · S tokens · V vocabulary
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.tokenizer import Tokenizer
from pipeline.tasks.questions import Question, Score, Task, mean

# Tokens in one forward pass. Their logits exist at the same time: 2 GiB for 32,768 pieces in fp32.
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
_ROUND = 16  # rows are padded to a multiple of this, so that few different shapes occur


class Pair(NamedTuple):
    context: tuple[int, ...]  # never empty
    answer: tuple[int, ...]


class Likelihood(NamedTuple):
    nats: float  # log-likelihood of the answer after its context
    greedy: bool  # every token of the answer is the likeliest one


Scorer = Callable[[Sequence[Pair]], list[Likelihood]]


def encode_pair(tokenizer: Tokenizer, context: str, answer: str) -> Pair:
    """Return the tokens of both, split at the length of the context alone, as in lm-eval.

    Spaces at the end of the context belong to the first word of the answer. An empty context is
    replaced by the end of a document, which precedes every document in training."""
    stripped = context.rstrip()
    answer = context[len(stripped) :] + answer
    if not stripped:
        return Pair((tokenizer.eod,), _ids(tokenizer, answer))
    whole = _ids(tokenizer, stripped + answer)
    start = len(tokenizer.encode(stripped))
    return Pair(whole[:start], whole[start:])


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text).tolist())


class Batch(NamedTuple):
    numbers: list[int]  # of the pairs
    tokens_BS: Tensor
    # Rows and positions at which the answers are predicted, and the answers.
    rows_T: Tensor
    places_T: Tensor
    targets_T: Tensor


def make_batches(pairs: Sequence[Pair], longest: int, most_tokens: int) -> Iterator[Batch]:
    """Group pairs of similar length; a context that is too long is cut on the left."""
    order = sorted(range(len(pairs)), key=lambda i: -_length(pairs[i], longest))
    while order:
        width = math.ceil(_length(pairs[order[0]], longest) / _ROUND) * _ROUND
        width = min(width, longest)
        rows = max(1, most_tokens // width)
        chosen = order[:rows]
        order = order[rows:]
        tokens_BS = torch.zeros(len(chosen), width, dtype=torch.long)
        rows_T: list[int] = []
        places_T: list[int] = []
        targets_T: list[int] = []
        for row, number in enumerate(chosen):
            # The last token of an answer is predicted but not read. A causal model never attends
            # to padding on the right.
            whole = [*pairs[number].context, *pairs[number].answer][-(longest + 1) :]
            tokens_BS[row, : len(whole) - 1] = torch.tensor(whole[:-1])
            answer = min(len(pairs[number].answer), len(whole) - 1)
            rows_T += [row] * answer
            places_T += range(len(whole) - 1 - answer, len(whole) - 1)
            targets_T += whole[len(whole) - answer :]
        indices = (torch.tensor(each) for each in (rows_T, places_T, targets_T))
        yield Batch(chosen, tokens_BS, *indices)


def _length(pair: Pair, longest: int) -> int:
    return min(len(pair.context) + len(pair.answer) - 1, longest)


@torch.no_grad()
def score_batch(
    logits: Callable[[Tensor], Tensor], batch: Batch, device: torch.device
) -> list[Likelihood]:
    """Return the likelihoods of a batch, in its order."""
    logits_BSV = logits(batch.tokens_BS.to(device))
    rows_T = batch.rows_T.to(device)
    targets_T = batch.targets_T.to(device)
    # Only the places of the answers, in fp32.
    logits_TV = logits_BSV[rows_T, batch.places_T.to(device)].float()
    chosen_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None]).squeeze(1)
    missed_T = (logits_TV.argmax(-1) != targets_T).double()
    sums_B2 = torch.zeros(len(batch.numbers), 2, dtype=torch.double, device=device)
    sums_B2.index_add_(0, rows_T, torch.stack((chosen_T.double(), missed_T), dim=1))
    return [Likelihood(nats, missed == 0) for nats, missed in sums_B2.tolist()]


def scorer(logits: Callable[[Tensor], Tensor], longest: int, device: torch.device) -> Scorer:
    """Return a function that scores any number of pairs on one device."""

    def score(pairs: Sequence[Pair]) -> list[Likelihood]:
        found: dict[int, Likelihood] = {}
        for batch in make_batches(pairs, longest, PASS_TOKENS[device.type]):
            found.update(zip(batch.numbers, score_batch(logits, batch, device), strict=True))
        return [found[number] for number in range(len(pairs))]

    return score


def pairs_of(task: Task, tokenizer: Tokenizer) -> list[Pair]:
    """Return every answer of every question, in order."""
    return [
        encode_pair(tokenizer, question.prompt, answer)
        for question in task.questions
        for answer in question.answers
    ]


def score_parts(task: Task, likelihoods: Sequence[Likelihood]) -> dict[str, Score]:
    """Return the score of each part; `likelihoods` has the order of `pairs_of`."""
    parts: dict[str, list[Score]] = defaultdict(list)
    at = 0
    for question in task.questions:
        end = at + len(question.answers)
        parts[question.part].append(_score(question, likelihoods[at:end]))
        at = end
    # Within a part, each question counts the same.
    return {part: mean(scores) for part, scores in parts.items()}


def _score(question: Question, found: Sequence[Likelihood]) -> Score:
    sizes = [len(answer.encode()) for answer in question.answers]
    right = question.right
    bits = -found[right].nats / math.log(2) / sizes[right]
    if len(found) == 1:
        exact = float(found[0].greedy)
        return Score(exact, exact, bits, 1)
    plain = [each.nats for each in found]
    per_byte = [nats / size for nats, size in zip(plain, sizes, strict=True)]
    # Of equal answers the first wins, like numpy's argmax in lm-eval.
    accuracy = float(plain.index(max(plain)) == right)
    return Score(accuracy, float(per_byte.index(max(per_byte)) == right), bits, 1)
