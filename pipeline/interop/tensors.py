"""Our tensors under Hugging Face's names: one table per family, read in both directions.

Where we fuse (queries, keys and values; gate and up) the row names the parts in order. Names are those of the files on
the Hub, which transformers itself may fuse differently once they are loaded.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pipeline.config.schema import GQA, MLA, Model, MoE
from pipeline.errors import DataError


class To(NamedTuple):
    """What becomes of one of our tensors: rearranged, then cut along its rows into as many parts as there are names."""

    names: tuple[str, ...]
    how: Literal["as is", "turned", "paired", "swapped", "bias"] = "as is"


def _to(*names: str, how: Literal["as is", "turned", "paired", "swapped", "bias"] = "as is") -> To:
    return To(names, how)


_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_ENDS = {
    "embedding.weight": _to("model.embed_tokens.weight"),
    "norm.gain": _to("model.norm.weight"),
    "head.weight": _to("lm_head.weight"),
}
_NORMS = {
    "at_attention.before.gain": _to("input_layernorm.weight"),
    "at_ffn.before.gain": _to("post_attention_layernorm.weight"),
}
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_GROUPED = {
    "attention.qkv.weight": _to(*(f"{name}.weight" for name in _QKV)),
    "attention.qkv.bias": _to(*(f"{name}.bias" for name in _QKV)),
    "attention.out.weight": _to("self_attn.o_proj.weight"),
    "attention.out.bias": _to("self_attn.o_proj.bias"),
    "attention.q_norm.gain": _to("self_attn.q_norm.weight"),
    "attention.k_norm.gain": _to("self_attn.k_norm.weight"),
}
_LATENT = {
    "attention.q_down.weight": _to("self_attn.q_a_proj.weight"),
    "attention.q_norm.gain": _to("self_attn.q_a_layernorm.weight"),
    "attention.q_up.weight": _to("self_attn.q_b_proj.weight", how="paired"),
    "attention.kv_down.weight": _to("self_attn.kv_a_proj_with_mqa.weight", how="paired"),
    "attention.kv_norm.gain": _to("self_attn.kv_a_layernorm.weight"),
    "attention.kv_up.weight": _to("self_attn.kv_b_proj.weight"),
    "attention.out.weight": _to("self_attn.o_proj.weight"),
}
_DENSE = {
    "ffn.up.weight": _to("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.up.bias": _to("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "ffn.out.weight": _to("mlp.down_proj.weight"),
    "ffn.out.bias": _to("mlp.down_proj.bias"),
}


def _routed(at: str, gate: str, up: str, down: str) -> dict[str, To]:
    return {
        "ffn.router.weight": _to(f"{at}.gate.weight"),
        "ffn.router.steps": _to(f"{at}.gate.e_score_correction_bias", how="bias"),
        "ffn.experts.up": _to(f"{at}.experts.{{expert}}.{gate}", f"{at}.experts.{{expert}}.{up}", how="turned"),
        "ffn.experts.out": _to(f"{at}.experts.{{expert}}.{down}", how="turned"),
        "ffn.shared.up.weight": _to(f"{at}.shared_experts.{gate}", f"{at}.shared_experts.{up}"),
        "ffn.shared.out.weight": _to(f"{at}.shared_experts.{down}"),
    }


_AHEAD = {
    "ahead.h_norm.gain": _to("hnorm.weight"),
    "ahead.e_norm.gain": _to("enorm.weight"),
    "ahead.join.weight": _to("eh_proj.weight", how="swapped"),
    "ahead.norm.gain": _to("shared_head.norm.weight"),
}
_LLAMA = {**_ENDS, **_NORMS, **_GROUPED, **_DENSE}
_DEEPSEEK = {**_ENDS, **_NORMS, **_LATENT, **_DENSE, **_routed("mlp", *_MLP)}
TENSORS: dict[str, dict[str, To]] = {
    "gpt2": {
        "embedding.weight": _to("transformer.wte.weight"),
        "position.weight": _to("transformer.wpe.weight"),
        "norm.gain": _to("transformer.ln_f.weight"),
        "norm.bias": _to("transformer.ln_f.bias"),
        "head.weight": _to("lm_head.weight"),
        "at_attention.before.gain": _to("ln_1.weight"),
        "at_attention.before.bias": _to("ln_1.bias"),
        "attention.qkv.weight": _to("attn.c_attn.weight", how="turned"),
        "attention.qkv.bias": _to("attn.c_attn.bias"),
        "attention.out.weight": _to("attn.c_proj.weight", how="turned"),
        "attention.out.bias": _to("attn.c_proj.bias"),
        "at_ffn.before.gain": _to("ln_2.weight"),
        "at_ffn.before.bias": _to("ln_2.bias"),
        "ffn.up.weight": _to("mlp.c_fc.weight", how="turned"),
        "ffn.up.bias": _to("mlp.c_fc.bias"),
        "ffn.out.weight": _to("mlp.c_proj.weight", how="turned"),
        "ffn.out.bias": _to("mlp.c_proj.bias"),
    },
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, **_routed("block_sparse_moe", "w1.weight", "w3.weight", "w2.weight")},
    "qwen3_moe": {**_LLAMA, **_routed("mlp", *_MLP)},
    "dots1": {**_LLAMA, **_routed("mlp", *_MLP)},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, **_AHEAD},
}


class Row(NamedTuple):
    ours: str
    expert: int | None  # which of ours, where we stack them
    theirs: list[str]
    how: str


def rows(model: Model, family: str, ours: Mapping[str, Tensor]) -> Iterator[Row]:
    """Where each of our tensors goes."""
    table, stack = TENSORS[family], "transformer.h" if family == "gpt2" else "model.layers"
    for name, tensor in ours.items():
        head, *rest = name.split(".", 2)
        at, leaf = "", name
        if head == "blocks":
            at, leaf = f"{stack}.{rest[0]}.", rest[1]
        elif head == "ahead":
            if "ahead.join.weight" not in table:  # only training uses them
                continue
            at = f"{stack}.{model.layers + int(rest[0])}."  # they follow the others
            leaf = rest[1].removeprefix("block.") if rest[1].startswith("block.") else f"ahead.{rest[1]}"
        to = table[leaf]
        if leaf == "attention.q_up.weight" and isinstance(model.attention, MLA) and model.attention.q_rank is None:
            to = to._replace(names=("self_attn.q_proj.weight",))
        stacked = leaf.startswith("ffn.experts.")
        for expert in range(len(tensor)) if stacked else (None,):
            yield Row(name, expert, [at + each.format(expert=expert) for each in to.names], to.how)


def out(model: Model, row: Row, tensor: Tensor) -> list[Tensor]:
    """Ours → theirs."""
    if row.expert is not None:
        tensor = tensor[row.expert]
    match row.how:
        case "turned":
            tensor = tensor.T
        case "paired":
            tensor = tensor[_pairs(model, row.ours)]
        case "swapped":
            tensor = tensor.roll(model.width, 1)
        case "bias":
            assert isinstance(model.ffn, MoE)
            tensor = model.ffn.bias_step * (tensor.float() - tensor.float().mean())
        case _:
            pass
    return list(torch.split(tensor, _sizes(model, len(row.theirs), len(tensor))))


def back(model: Model, row: Row, parts: list[Tensor]) -> Tensor:
    """Theirs → ours."""
    tensor = torch.cat(parts)
    match row.how:
        case "turned":
            return tensor.T
        case "paired":
            return tensor[_pairs(model, row.ours).argsort()]
        case "swapped":
            return tensor.roll(model.width, 1)
        case "bias":
            assert isinstance(model.ffn, MoE)
            return (tensor / model.ffn.bias_step).round().to(torch.int32)
        case _:
            return tensor


def _sizes(model: Model, parts: int, length: int) -> list[int]:
    a = model.attention
    if parts == 3:
        assert isinstance(a, GQA)
        return [heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads)]
    return [length // parts] * parts


def _pairs(model: Model, name: str) -> Tensor:
    """DeepSeek turns neighbouring channels, we turn channel i with i + half: where each of its rows is in ours."""
    a = model.attention
    assert isinstance(a, MLA)
    heads, kept = (a.heads, a.nope_dim) if name.endswith("q_up.weight") else (1, a.kv_rank)
    turned = kept + torch.arange(a.rope_dim).view(2, -1).T.flatten()
    one = torch.cat((torch.arange(kept), turned))
    return (torch.arange(heads)[:, None] * len(one) + one).flatten()


Read = Callable[[str], Tensor]


def gather(model: Model, family: str, ours: Mapping[str, Tensor], read: Read) -> Iterator[tuple[str, Tensor]]:
    """All of ours from theirs; `ours` gives names and shapes alone."""
    stacks: dict[str, list[Tensor]] = {}
    for row in rows(model, family, ours):
        tensor = back(model, row, [read(name) for name in row.theirs])
        if row.expert is not None:
            stack = stacks.setdefault(row.ours, [])
            stack.append(tensor)
            if len(stack) < len(ours[row.ours]):
                continue
            tensor = torch.stack(stacks.pop(row.ours))
        if tensor.shape != ours[row.ours].shape:
            raise DataError(
                f"{row.theirs[0]} has shape {tuple(tensor.shape)} for {row.ours}, but config.json makes it "
                f"{tuple(ours[row.ours].shape)}; the files do not belong together"
            )
        yield row.ours, tensor
