"""Text from a model: greedy, sampled or by beam search, one forward pass of one token per step.

B prompts or beams · V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from pipeline.config.parts import Learned
from pipeline.errors import ConfigError
from pipeline.model.attention import Cache
from pipeline.model.stack import Decoder


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


class Beam(NamedTuple):
    score: float  # log likelihood, in nats
    tokens: tuple[int, ...]


@torch.inference_mode()
def stream(
    model: Decoder, prompts: Sequence[Sequence[int]], most: int, end: int | None, sampling: Sampling
) -> Iterator[list[int | None]]:
    """The next token of every prompt, step by step; None once it has ended. Prompts are padded on the left, and none
    depends on the others: not on their lengths, nor on what they draw."""
    device = model.embedding.weight.device
    longest = _room(model, prompts, most)
    padding = torch.tensor([longest - len(p) for p in prompts], device=device)
    rows = [[0] * (longest - len(p)) + list(p) for p in prompts]
    tokens_BS = torch.tensor(rows, device=device)
    cache = Cache(len(model.blocks), longest + most, padding if padding.any() else None)
    draws = [
        torch.Generator().manual_seed(sampling.seed + 0x9E3779B9 * row)
        for row in range(len(prompts))
    ]
    ended = [False] * len(prompts)
    for _ in range(most):
        next_B = pick(_step(model, tokens_BS, cache), sampling, draws)
        new = next_B.tolist()
        yield [None if over else token for token, over in zip(new, ended, strict=True)]
        ended = [over or token == end for token, over in zip(new, ended, strict=True)]
        if all(ended):
            return
        tokens_BS = next_B[:, None].to(device)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    most: int,
    end: int | None = None,
    sampling: Sampling | None = None,
) -> list[list[int]]:
    """What follows each prompt, its end included."""
    out: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, most, end, sampling or Sampling()):
        for row, token in zip(out, step, strict=True):
            if token is not None:
                row.append(token)
    return out


def pick(logits_BV: Tensor, sampling: Sampling, draws: Sequence[torch.Generator]) -> Tensor:
    """One token per row: the likeliest, or drawn from what top-k and then top-p leave."""
    logits_BV = logits_BV.float().cpu()
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    logits, order = (logits_BV / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        logits = logits[:, : sampling.top_k]
    chance = logits.softmax(-1)
    # the smallest set of the likeliest whose chances reach top_p: the first is always in it
    chance = torch.where(chance.cumsum(-1) - chance < sampling.top_p, chance, 0.0)
    chance[:, 0] = chance[:, 0].clamp(min=1e-30)
    reached = chance.cumsum(-1)
    throws = (
        torch.stack([torch.rand((), generator=each) for each in draws]).unsqueeze(1)
        * reached[:, -1:]
    )
    place = torch.searchsorted(reached, throws, right=True).clamp(max=int(chance.shape[1]) - 1)
    return order.gather(1, place).squeeze(1)


@torch.inference_mode()
def beam_search(
    model: Decoder, prompt: Sequence[int], most: int, end: int | None, width: int
) -> list[Beam]:
    """The likeliest continuations found by keeping `width` of them, best first."""
    device = model.embedding.weight.device
    cache = Cache(len(model.blocks), _room(model, [prompt], most) + most)
    tokens_BS = torch.tensor([list(prompt)], device=device)
    live, done = [Beam(0.0, ())], list[Beam]()
    for _ in range(most):
        likely_BV = _step(model, tokens_BS, cache).float().log_softmax(-1)
        total_BV = likely_BV + torch.tensor([beam.score for beam in live], device=device)[:, None]
        best = total_BV.flatten().topk(min(2 * width, total_BV.numel()))
        live, rows, old = [], list[int](), live
        for score, at in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            row, token = divmod(at, total_BV.shape[1])
            beam = Beam(score, (*old[row].tokens, token))
            if token == end:
                done.append(beam)
            elif len(live) < width:
                live.append(beam)
                rows.append(row)
        done = sorted(done, reverse=True)[:width]
        if not live or (
            len(done) == width and done[-1].score >= live[0].score
        ):  # likelihood only falls
            break
        cache.reorder(torch.tensor(rows, device=device))
        tokens_BS = torch.tensor([beam.tokens[-1:] for beam in live], device=device)
    return sorted([*done, *live], reverse=True)[:width]


def _step(model: Decoder, tokens_BS: Tensor, cache: Cache) -> Tensor:
    return cast(Tensor, model(tokens_BS, cache=cache))[:, -1]


def _room(model: Decoder, prompts: Sequence[Sequence[int]], most: int) -> int:
    """The longest prompt; refuses what has no learned position."""
    longest = max(map(len, prompts))
    if isinstance(model.cfg.position, Learned) and longest + most > model.cfg.seq:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max-new {most} exceed the {model.cfg.seq} learned positions; "
            f"give at most --max-new {max(0, model.cfg.seq - longest)}"
        )
    return longest
