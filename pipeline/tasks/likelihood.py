"""Log-likelihoods of answers, and the scores that follow from them.

B rows · S tokens · V vocabulary
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.data.tokenizer import Tokenizer
from pipeline.tasks.questions import Question, Score, Task, mean

# In one forward pass, if the vocabulary is small. A GPU gets larger passes, because the host cannot
# start the kernels of small ones fast enough.
_PASS_TOKENS = {"cpu": 2048, "cuda": 65536}
# In one forward pass: half a GB in fp32 on a CPU, 1 GB in bf16 on a GPU.
_PASS_LOGITS = {"cpu": 2**27, "cuda": 2**29}
_CHUNK_LOGITS = 2**26  # turned into logarithms at the same time, in fp32: 256 MB
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
    whole = tuple(tokenizer.encode(context + answer).tolist())
    # The last token is always scored, even if its text begins in the context.
    start = min(len(tokenizer.encode(stripped)), len(whole) - 1)
    return Pair(whole[:start] or (tokenizer.eod,), whole[start:])


def pass_tokens(vocab: int, device: torch.device) -> int:
    """Return the tokens of a forward pass, unless a single row has more."""
    return min(_PASS_TOKENS[device.type], _PASS_LOGITS[device.type] // vocab)


def padded(length: int, longest: int) -> int:
    """Return the width of a row for so many tokens."""
    return min(math.ceil(length / _ROUND) * _ROUND, longest)


class Batch(NamedTuple):
    windows: list[tuple[int, int]]  # number of a pair, and of a window of its answer
    inputs: dict[str, Tensor]  # of the model
    # Rows and positions at which the answers are predicted, and the answers.
    rows_T: Tensor
    places_T: Tensor
    targets_T: Tensor

    def to(self, device: torch.device) -> "Batch":
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return Batch(self.windows, inputs, *(tensor.to(device) for tensor in self[2:]))


def make_batches(
    pairs: Sequence[Pair], longest: int, most_tokens: int, *, whole_contexts: bool = False
) -> Iterator[Batch]:
    """Group pairs of similar length; a context that is too long is cut on the left. With
    `whole_contexts`, every token of a context attends to all of it."""
    windows = {
        (number, window): each
        for number, pair in enumerate(pairs)
        for window, each in enumerate(_windows(pair, longest))
    }
    lengths = {key: len(each.context) + len(each.answer) - 1 for key, each in windows.items()}
    order = sorted(windows, key=lambda key: -lengths[key])
    while order:
        # At least one token: for an empty answer after a single token, the model reads nothing.
        width = padded(max(1, lengths[order[0]]), longest)
        rows = max(1, most_tokens // width)
        chosen = order[:rows]
        order = order[rows:]
        tokens_BS = torch.zeros(len(chosen), width, dtype=torch.long)
        rows_T: list[int] = []
        places_T: list[int] = []
        targets_T: list[int] = []
        for row, key in enumerate(chosen):
            # The last token of an answer is predicted but not read. A causal model never attends
            # to padding on the right.
            context, answer = windows[key]
            read = (context + answer)[:-1]
            tokens_BS[row, : len(read)] = torch.tensor(read)
            rows_T += [row] * len(answer)
            places_T += range(len(read) - len(answer), len(read))
            targets_T += answer
        inputs = {"tokens_BS": tokens_BS}
        if whole_contexts:
            inputs["prefix_B"] = torch.tensor([len(windows[key].context) for key in chosen])
        indices = (torch.tensor(each, dtype=torch.long) for each in (rows_T, places_T, targets_T))
        yield Batch(chosen, inputs, *indices)


def _windows(pair: Pair, longest: int) -> Iterator[Pair]:
    """Cut an answer into parts that the model can read, each with as much context as fits.

    These are the windows of lm-eval for whole texts. Most answers have one."""
    whole = pair.context + pair.answer
    first = len(pair.context)
    for at in range(first, max(first + 1, len(whole)), longest):
        end = min(at + longest, len(whole))
        yield Pair(whole[max(0, end - longest - 1) : at], whole[at:end])


def join(found: Mapping[tuple[int, int], Likelihood]) -> list[Likelihood]:
    """Return the likelihoods of the pairs, in order, from those of all windows."""
    joined: list[Likelihood] = []
    for (_, window), one in sorted(found.items()):
        before = joined.pop() if window else Likelihood(0.0, greedy=True)
        joined.append(Likelihood(before.nats + one.nats, before.greedy and one.greedy))
    return joined


@torch.no_grad()
def score_batch(logits: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return two numbers for each row, (B, 2): the nats of its answer, and how many of the answer's
    tokens are not the likeliest. They stay on the device, so that the host need not wait."""
    logits_BSV = logits(**batch.inputs)
    sums_B2 = torch.zeros(len(batch.windows), 2, dtype=torch.double, device=logits_BSV.device)
    chunk = max(1, _CHUNK_LOGITS // logits_BSV.shape[-1])
    answers = (batch.rows_T, batch.places_T, batch.targets_T)
    parts = (torch.split(index_T, chunk) for index_T in answers)
    for rows_T, places_T, targets_T in zip(*parts, strict=True):
        # Only the places of the answers.
        logits_TV = logits_BSV[rows_T, places_T]
        nats_TV = logits_TV.log_softmax(-1, dtype=torch.float32)
        chosen_T = nats_TV.gather(1, targets_T[:, None]).squeeze(1)
        missed_T = logits_TV.argmax(-1) != targets_T
        sums_B2.index_add_(0, rows_T, torch.stack((chosen_T, missed_T), dim=1).double())
    return sums_B2


def score_batches(
    logits: Callable[..., Tensor], batches: Sequence[Batch]
) -> dict[tuple[int, int], Likelihood]:
    """Return the likelihood of every window of some batches."""
    # All batches are started before the first result is read.
    sums = [score_batch(logits, batch) for batch in batches]
    return {
        window: Likelihood(nats, missed == 0)
        for batch, sums_B2 in zip(batches, sums, strict=True)
        for window, (nats, missed) in zip(batch.windows, sums_B2.tolist(), strict=True)
    }


def scorer(
    logits: Callable[..., Tensor],
    longest: int,
    vocab: int,
    device: torch.device,
    *,
    whole_contexts: bool = False,
) -> Scorer:
    """Return a function that scores any number of pairs on one device."""

    def score(pairs: Sequence[Pair]) -> list[Likelihood]:
        most_tokens = pass_tokens(vocab, device)
        batches = make_batches(pairs, longest, most_tokens, whole_contexts=whole_contexts)
        return join(score_batches(logits, [batch.to(device) for batch in batches]))

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
