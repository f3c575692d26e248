"""Text generation: greedy, sampled or by beam search, with one forward pass per new token.

B prompts or beams · S sequence · V vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, from_numpy, nn

from pipeline.config.parts import Learned
from pipeline.errors import ConfigError
from pipeline.model.context import Cache
from pipeline.model.head import Head
from pipeline.model.stack import Decoder


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def row_seed(self, row: int) -> int:
        """Return the seed of one prompt. The constant only keeps the prompts' seeds apart."""
        return self.seed + 0x9E3779B9 * row


class Beam(NamedTuple):
    score: float  # log likelihood, in nats
    tokens: tuple[int, ...]


@torch.inference_mode()
def stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    most: int,
    end: int | None,
    sampling: Sampling,
    sources: Sequence[Sequence[int]] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of every prompt, at most `most` times; None for a prompt that has ended.

    Prompts are padded on the left. The result of one does not depend on the others. An
    encoder–decoder reads one source per prompt; the prompt is the start of the decoder's text."""
    device = model.embedding.weight.device
    longest = _longest_prompt(model, prompts, most)
    fields = source_fields(model, sources)
    padding_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    # Padding may be any token, because the mask hides it.
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens_BS = torch.tensor(rows, device=device)
    # The cache never grows. Its size is rounded up, because SDPA needs mask rows of 8·n keys.
    capacity = -(-(longest + most) // 8) * 8
    cache = Cache(model.cfg.layers, capacity, padding_B if padding_B.any() else None)
    seeds = [sampling.row_seed(row) for row in range(len(prompts))]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    ended = [False] * len(prompts)
    logits_BV = last_logits(model, tokens_BS, cache, **fields)
    run_pass = single_pass(model, cache, tokens_BS[:, -1:], most)
    for done in range(1, most + 1):
        next_B = pick(logits_BV, sampling, generators)
        new = next_B.tolist()
        yield [None if over else token for token, over in zip(new, ended, strict=True)]
        ended = [over or token == end for token, over in zip(new, ended, strict=True)]
        if all(ended) or done == most:
            return
        logits_BV = run_pass(next_B[:, None].to(device))


class RecordedPass:
    """The pass for one new token per row, recorded as a CUDA graph and repeated for each token.

    The host needs several times as long to start a small pass's kernels as the GPU to run them. A
    graph starts them all at once."""

    def __init__(self, model: Decoder, cache: Cache, tokens_B1: Tensor) -> None:
        device = tokens_B1.device
        self._cache = cache  # keeps the memory alive that the graph reads and writes
        self._tokens_B1 = tokens_B1.clone()
        place = torch.tensor([cache.length], device=device)
        cache.fix(place)
        with torch.cuda.device(device):
            # Before recording, torch requires a pass on another stream, which compiles and
            # allocates. The next pass overwrites the token that this one adds to the cache.
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                last_logits(model, self._tokens_B1, cache)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits_BV = last_logits(model, self._tokens_B1, cache)
                place.add_(1)

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        self._tokens_B1.copy_(tokens_B1)
        self._graph.replay()
        return self._logits_BV


def single_pass(
    model: Decoder, cache: Cache, tokens_B1: Tensor, most: int
) -> Callable[[Tensor], Tensor]:
    """Return the pass for one more token per row; on a GPU, a recorded one if that is possible."""
    # Recording costs several passes. Routed experts read counts on the host, which a graph cannot.
    if tokens_B1.is_cuda and most > 8 and not model.routers():
        return RecordedPass(model, cache, tokens_B1)
    return lambda tokens_B1: last_logits(model, tokens_B1, cache)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    most: int,
    end: int | None = None,
    sampling: Sampling | None = None,
    sources: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Return the continuation of each prompt, including its end token."""
    out: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, most, end, sampling or Sampling(), sources):
        for row, token in zip(out, step, strict=True):
            if token is not None:
                row.append(token)
    return out


def pick(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """Return one token per row: the likeliest, or one sampled after top-k and then top-p."""
    if sampling.temperature == 0:
        # On a CPU, NumPy's argmax takes a tenth of the time of torch's.
        on_gpu = logits_BV.is_cuda
        return logits_BV.argmax(-1) if on_gpu else from_numpy(logits_BV.float().numpy().argmax(-1))
    # On the CPU, whose generators give the same draws on every machine.
    logits_BV = logits_BV.float().cpu()
    # The largest is zero, so that a tiny temperature makes no infinities to subtract.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature
    logits, order = logits_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        logits = logits[:, : sampling.top_k]
    probs = logits.softmax(-1)
    # Keep the smallest set of likeliest tokens whose probabilities sum to top_p, at least one.
    probs = torch.where(probs.cumsum(-1) - probs < sampling.top_p, probs, 0.0)
    # With top_p=0 no token would be left.
    probs[:, 0] = probs[:, 0].clamp(min=1e-30)
    cumulative = probs.cumsum(-1)
    uniform = torch.stack([torch.rand((), generator=each) for each in generators])
    # Invert the cumulative distribution: one uniform number per row, whatever the batch.
    rank = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True)
    return order.gather(1, rank.clamp(max=int(probs.shape[1]) - 1)).squeeze(1)


@torch.inference_mode()
def beam_search(
    model: Decoder,
    prompt: Sequence[int],
    most: int,
    end: int | None,
    width: int,
    source: Sequence[int] | None = None,
) -> list[Beam]:
    """Return the likeliest continuations, best first. Each step keeps `width` of them."""
    device = model.embedding.weight.device
    cache = Cache(model.cfg.layers, _longest_prompt(model, [prompt], most) + most)
    tokens_BS = torch.tensor([list(prompt)], device=device)
    fields = source_fields(model, None if source is None else [source])
    live = [Beam(0.0, ())]
    done: list[Beam] = []
    for _ in range(most):
        likely_BV = last_logits(model, tokens_BS, cache, **fields).float().log_softmax(-1)
        fields = {}  # the cache has the source's keys and values
        total_BV = likely_BV + torch.tensor([beam.score for beam in live], device=device)[:, None]
        # Twice the width, because up to `width` of them may end here.
        best = total_BV.flatten().topk(min(2 * width, total_BV.numel()))
        old = live
        live = []
        rows: list[int] = []  # which old beam each live one continues
        for score, at in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            row, token = divmod(at, total_BV.shape[1])
            beam = Beam(score, (*old[row].tokens, token))
            if token == end:
                done.append(beam)
            elif len(live) < width:
                live.append(beam)
                rows.append(row)
        done = sorted(done, reverse=True)[:width]
        # A beam only becomes less likely, so no live beam can overtake those that are done.
        if not live or (len(done) == width and done[-1].score >= live[0].score):
            break
        cache.reorder(torch.tensor(rows, device=device))
        tokens_BS = torch.tensor([beam.tokens[-1:] for beam in live], device=device)
    return sorted([*done, *live], reverse=True)[:width]


def lay_out(model: Decoder) -> None:
    """Store the matrices of a model on a CPU by columns, for decoding.

    Measured on aarch64: up to 64 rows, a product with such a matrix is often twice as fast. The
    values stay the same. Call this only for a model that is not trained: it moves the weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Head) and not module.weight.is_cuda:
            module.weight.data = module.weight.data.t().contiguous().t()


def last_logits(model: Decoder, tokens_BS: Tensor, cache: Cache, **fields: Tensor) -> Tensor:
    return cast(Tensor, model(tokens_BS, cache=cache, **fields))[:, -1]


def source_fields(model: Decoder, sources: Sequence[Sequence[int]] | None) -> dict[str, Tensor]:
    """Return the encoder's input, padded on the right; padding is a separate document."""
    both = model.cfg.stack == "encoder-decoder"
    if both != (sources is not None):
        given = "needs a source for its encoder" if both else "has no encoder to read a source"
        remedy = "give one for each prompt" if both else "give prompts only"
        raise ConfigError(f'model.stack="{model.cfg.stack}" {given}; {remedy}')
    if sources is None:
        return {}
    device = model.embedding.weight.device
    longest = max(map(len, sources))
    most = model.cfg.learned_positions
    if isinstance(model.cfg.position, Learned) and longest > most:
        text = f"a source of {longest} tokens exceeds the {most} learned positions"
        raise ConfigError(f"{text}; give a shorter one")
    rows = [list(source) + [0] * (longest - len(source)) for source in sources]
    padding = [[0] * len(source) + [1] * (longest - len(source)) for source in sources]
    fields = {"source_BE": torch.tensor(rows, device=device)}
    if any(map(any, padding)):  # attention without a mask is faster
        fields["source_documents_BE"] = torch.tensor(padding, device=device)
    return fields


def _longest_prompt(model: Decoder, prompts: Sequence[Sequence[int]], most: int) -> int:
    """Return the length of the longest prompt; raise if there are too few learned positions."""
    if not model.cfg.causal:
        raise ConfigError(
            'model.stack="encoder" attends in both directions and cannot continue a text; '
            "use the checkpoint of a decoder"
        )
    longest = max(map(len, prompts))
    if isinstance(model.cfg.position, Learned) and longest + most > model.cfg.seq:
        left = model.cfg.seq - longest
        remedy = f"give at most --max-new {left}" if left > 0 else "give a shorter prompt"
        raise ConfigError(
            f"a prompt of {longest} tokens and --max-new {most} exceed the {model.cfg.seq} "
            f"learned positions; {remedy}"
        )
    return longest
