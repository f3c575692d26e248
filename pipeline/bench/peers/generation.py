"""Time greedy generation beside `generate` of transformers, with the same weights and prompts."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, __version__
from transformers.utils import logging

from pipeline.bench.peers.trainers import hub_family
from pipeline.config.schema import RunSpec
from pipeline.errors import ConfigError, RunError
from pipeline.hub.exporting import hub_config, hub_state
from pipeline.model.build import build_model, init_weights
from pipeline.model.context import Cache
from pipeline.model.decode import generate, last_logits, lay_out, source_fields
from pipeline.model.stack import Decoder
from pipeline.planner import count as account
from pipeline.train.measure import device_name

# The largest difference of the first logits. With different weights they differ by several units.
_MAX_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


def random_model(spec: RunSpec, device: str, dtype: torch.dtype) -> Decoder:
    """Build a model with random weights. No matrix is zero, so that every layer has an effect."""
    hub_family(spec.model)  # refuse before building
    cfg = spec.model.model_copy(update={"init_out": "same", "head_std": None})
    model = build_model(cfg)
    init_weights(model, cfg, spec.seed)
    return model.to(device, dtype).eval()


def measure_generation(
    model: Decoder, rows: int, prompt_tokens: int, new_tokens: int, rounds: int
) -> Iterator[tuple[str, Any]]:
    """Yield figures as they are measured; raise RunError if the first logits differ."""
    cfg = model.cfg
    if not cfg.causal:
        raise ConfigError(f"model.arch={cfg.arch} does not generate; use another, such as dense")
    sides = Sides(model, rows, prompt_tokens)
    yield "device", device_name(sides.device)
    yield "model", f"{cfg.size} {cfg.arch}: {account.params(cfg).total:,} parameters, {sides.dtype}"
    yield "compared with", f"{hub_family(cfg).architecture} of transformers {__version__}"
    yield "first logits differ by", sides.difference()
    pairs = zip(sides.ours(new_tokens), sides.theirs(new_tokens), strict=True)  # and warm up
    yield "rows with the same tokens", f"{sum(a == b for a, b in pairs)} of {rows}"
    own_s, other_s = sides.seconds(1, rounds)
    yield "first token ms, ours and HF's", f"{own_s * 1e3:.1f} {other_s * 1e3:.1f}"
    own_s, other_s = sides.seconds(new_tokens, rounds)
    own, other = (rows * new_tokens / seconds for seconds in (own_s, other_s))
    yield "tokens/s, ours and HF's in turn", f"{own:,.1f} {other:,.1f}"
    yield "ours over HF", round(other_s / own_s, 3)


class Sides:
    """Our model and the class of transformers with a copy of its weights, on random prompts."""

    def __init__(self, model: Decoder, rows: int, prompt_tokens: int) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.device = model.embedding.weight.device
        self.dtype = model.embedding.weight.dtype
        self._model = model
        family = hub_family(model.cfg)
        tensors = hub_state(model, family, self.dtype)
        # A copy in their layout: a view of a matrix that we store by columns could be slower.
        state = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors}
        shape = AutoConfig.for_model(**hub_config(model.cfg, family, None, self.dtype))
        load = getattr(transformers, family.architecture).from_pretrained
        peer = load(None, config=shape, state_dict=state, dtype=self.dtype)
        self._peer = peer.to(self.device).eval()
        lay_out(model)  # as `launch generate` does
        # The default settings of some classes force tokens or stop early; ours do neither.
        self._peer.generation_config = GenerationConfig()
        torch.manual_seed(0)
        read_BS = torch.randint(model.cfg.vocab, (rows, prompt_tokens), device=self.device)
        self._prompts_BS = read_BS
        self._sources = None
        self._fields = {"input_ids": read_BS, "attention_mask": torch.ones_like(read_BS)}
        if model.cfg.stack == "encoder-decoder":
            self._sources = read_BS.tolist()
            self._prompts_BS = torch.zeros_like(read_BS[:, :1])  # any token
            self._fields["decoder_input_ids"] = self._prompts_BS
            self._peer.generation_config.decoder_start_token_id = 0

    def ours(self, count: int) -> list[list[int]]:
        return generate(self._model, self._prompts_BS.tolist(), count, sources=self._sources)

    def theirs(self, count: int) -> Any:
        return self._generate(count)[:, -count:].tolist()

    def _generate(self, count: int, **more: bool) -> Any:
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        return self._peer.generate(**self._fields, **lengths, do_sample=False, **more)

    def seconds(self, count: int, rounds: int) -> list[float]:
        """Return the median seconds of each side; they take turns, because machines are noisy."""
        spent: dict[Any, list[float]] = {self.ours: [], self.theirs: []}
        for _ in range(rounds):
            for side, seconds in spent.items():
                began = time.perf_counter()
                side(count)  # returns the tokens to the host, so the device is done
                seconds.append(time.perf_counter() - began)
        return [statistics.median(seconds) for seconds in spent.values()]

    @torch.inference_mode()
    def difference(self) -> float:
        """Return the largest difference of the first new token's logits; raise if it is large."""
        cache = Cache(self._model.cfg.layers, self._prompts_BS.shape[1])
        fields = source_fields(self._model, self._sources)
        own_BV = last_logits(self._model, self._prompts_BS, cache, **fields)
        out = self._generate(1, output_logits=True, return_dict_in_generate=True)
        difference = float((own_BV.float() - out.logits[0].float()).abs().max())
        if not difference <= _MAX_DIFFERENCE[self.dtype]:  # NaN fails the comparison
            raise RunError(f"the first logits differ by {difference:.2g}; compare another --arch")
        return difference
