"""Our tensors under Hugging Face's names: one table per family, read in both directions.

Where we fuse tensors (queries, keys and values; gate and up) a row names the parts in order. The
names are those of the files on the Hub; transformers may fuse them differently after loading.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.parts import GQA, MLA, MoE
from pipeline.config.shape import Model
from pipeline.errors import DataError
from pipeline.hub.stack_tensors import DEFAULT_LAYERS, LAYERS, STACK_TENSORS, Names


def _each(at: str, *parts: str) -> str:
    return " ".join(at.format(part) for part in parts)


_QKV = ("q", "k", "v")
_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
# Names within a layer have no prefix here; `rows` adds it.
_LLAMA: Names = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "at_attention.before.gain": "input_layernorm.weight",
    "attention.qkv.weight": _each("self_attn.{}_proj.weight", *_QKV),
    "attention.qkv.bias": _each("self_attn.{}_proj.bias", *_QKV),
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.out.bias": "self_attn.o_proj.bias",
    "attention.q_norm.gain": "self_attn.q_norm.weight",
    "attention.k_norm.gain": "self_attn.k_norm.weight",
    "at_ffn.before.gain": "post_attention_layernorm.weight",
    "ffn.up.weight": _each("mlp.{}_proj.weight", "gate", "up"),
    "ffn.up.bias": _each("mlp.{}_proj.bias", "gate", "up"),
    "ffn.out.weight": "mlp.down_proj.weight",
    "ffn.out.bias": "mlp.down_proj.bias",
}


def _routed(at: str, gate: str, up: str, down: str) -> Names:
    return {
        "ffn.router.weight": f"{at}.gate.weight",
        "ffn.router.steps": f"{at}.gate.e_score_correction_bias",
        "ffn.experts.up": _each(f"{at}.experts.EXPERT.{{}}", gate, up),
        "ffn.experts.out": f"{at}.experts.EXPERT.{down}",
        "ffn.shared.up.weight": _each(f"{at}.shared_experts.{{}}", gate, up),
        "ffn.shared.out.weight": f"{at}.shared_experts.{down}",
    }


_DEEPSEEK: Names = {
    **_LLAMA,
    **_routed("mlp", *_MLP),
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.gain": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.gain": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
}
_SUBLAYERS = {"at_attention": "attention_norms", "at_ffn": "mlp_norms"}
# Our own class (modeling_isoflop.py) has every norm that we have.
_OURS: Names = {
    **_LLAMA,
    **_routed("mlp", *_MLP),
    **{
        f"{ours}.{place}.{part}": f"{theirs}.{place}.{weight}"
        for ours, theirs in _SUBLAYERS.items()
        for place in ("before", "inside", "after")
        for part, weight in (("gain", "weight"), ("bias", "bias"))
    },
    "norm.bias": "model.norm.bias",
    "attention.q_norm.bias": "self_attn.q_norm.bias",
    "attention.k_norm.bias": "self_attn.k_norm.bias",
    "attention.sinks": "self_attn.sinks",
    "attention.value_gate.weight": "self_attn.value_gate.weight",
    "value_embeddings.weight": "self_attn.value_embedding.weight",
    "scales.stream": "stream_scale",
    "scales.first": "first_scale",
    "smear.gate.weight": "model.smear_gate.weight",
    "smear.scale": "model.smear_scale",
    "backout.scale": "model.backout_scale",
}
TENSORS: dict[str, Names] = {
    **STACK_TENSORS,
    "isoflop": _OURS,
    "gpt2": {
        "embedding.weight": "transformer.wte.weight",
        "position.weight": "transformer.wpe.weight",
        "norm.gain": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
        "at_attention.before.gain": "ln_1.weight",
        "at_attention.before.bias": "ln_1.bias",
        "attention.qkv.weight": "attn.c_attn.weight",
        "attention.qkv.bias": "attn.c_attn.bias",
        "attention.out.weight": "attn.c_proj.weight",
        "attention.out.bias": "attn.c_proj.bias",
        "at_ffn.before.gain": "ln_2.weight",
        "at_ffn.before.bias": "ln_2.bias",
        "ffn.up.weight": "mlp.c_fc.weight",
        "ffn.up.bias": "mlp.c_fc.bias",
        "ffn.out.weight": "mlp.c_proj.weight",
        "ffn.out.bias": "mlp.c_proj.bias",
    },
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "mistral": _LLAMA,
    # Mixtral's w1, w3 and w2 are gate, up and down.
    "mixtral": {**_LLAMA, **_routed("block_sparse_moe", "w1.weight", "w3.weight", "w2.weight")},
    "qwen3_moe": {**_LLAMA, **_routed("mlp", *_MLP)},
    "dots1": {**_LLAMA, **_routed("mlp", *_MLP)},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {
        **_DEEPSEEK,
        "ahead.h_norm.gain": "hnorm.weight",
        "ahead.e_norm.gain": "enorm.weight",
        "ahead.join.weight": "eh_proj.weight",
        "ahead.norm.gain": "shared_head.norm.weight",
    },
}
# How a tensor of ours is rearranged before it is split; all others are unchanged.
_CHANGES = {
    "ffn.experts.up": "transposed",  # ours are (in, out), for grouped_mm
    "ffn.experts.out": "transposed",
    "attention.q_up.weight": "interleaved",
    "attention.kv_down.weight": "interleaved",
    "ahead.join.weight": "swapped",  # we join (hidden, embedding), DeepSeek the reverse
    "ffn.router.steps": "bias",
}


class Row(NamedTuple):
    ours: str
    expert: int | None  # index in our stack of experts
    theirs: list[str]
    change: str


def rows(model: Model, family: str, ours: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yield a row for each of our tensors: the names of its parts in their files."""
    table = TENSORS[family]
    stack, source_stack = LAYERS.get(family, DEFAULT_LAYERS)
    for name, tensor in ours.items():
        prefix = ""
        leaf = name
        if name.startswith("blocks."):
            _, layer, leaf = name.split(".", 2)
            prefix = stack.format(layer)
        elif name.startswith("encoder.blocks."):
            _, _, layer, leaf = name.split(".", 3)
            prefix = source_stack.format(layer)
            if f"encoder.{leaf}" in table:
                leaf = f"encoder.{leaf}"
        elif name.startswith("value_embeddings."):  # ours are beside the blocks, theirs inside
            _, layer, leaf = name.split(".", 2)
            prefix = stack.format(layer)
            leaf = f"value_embeddings.{leaf}"
        elif name.startswith("ahead."):
            if "ahead.join.weight" not in table:  # only training uses these layers
                continue
            _, depth, leaf = name.split(".", 2)
            prefix = stack.format(model.layers + int(depth))  # they follow the others
            inner = leaf.startswith("block.")
            leaf = leaf.removeprefix("block.") if inner else f"ahead.{leaf}"
        names = table[leaf].split()
        if "ffn." in leaf and ".up" in leaf and not model.ffn.gated:
            names = names[-1:]  # without a gate
            if family == "t5":
                names = [names[0].replace("wi_1", "wi")]
        if leaf == "attention.q_up.weight" and getattr(model.attention, "q_rank", 0) is None:
            # Without a rank for queries there is one matrix instead of q_a_proj and q_b_proj.
            names = ["self_attn.q_proj.weight"]
        change = _CHANGES.get(leaf, "")
        if family == "gpt2" and prefix and tensor.ndim == 2:  # its matrices are (in, out)
            change = "transposed"
        for expert in range(len(tensor)) if "EXPERT" in names[0] else (None,):
            theirs = [prefix + each.replace("EXPERT", str(expert)) for each in names]
            yield Row(name, expert, theirs, change)


def to_hub_tensors(model: Model, row: Row, tensor: Tensor) -> list[Tensor]:
    """Convert one of our tensors to those of a row."""
    if row.expert is not None:
        tensor = tensor[row.expert]
    match row.change:
        case "transposed":
            tensor = tensor.T
        case "interleaved":
            tensor = tensor[_interleaved(model, row.ours)]
        case "swapped":
            # A roll by half of the columns is its own inverse.
            tensor = tensor.roll(model.width, 1)
        case "bias":
            assert isinstance(model.ffn, MoE)
            # We count steps; they store the bias itself, and only differences matter.
            tensor = model.ffn.bias_step * (tensor.float() - tensor.float().mean())
    return list(torch.split(tensor, _sizes(model, len(row.theirs), len(tensor))))


def from_hub_tensors(model: Model, row: Row, parts: list[Tensor]) -> Tensor:
    """Convert the tensors of a row to ours, or to one expert of it."""
    tensor = torch.cat(parts)
    match row.change:
        case "transposed":
            return tensor.T
        case "interleaved":
            return tensor[_interleaved(model, row.ours).argsort()]
        case "swapped":
            return tensor.roll(model.width, 1)
        case "bias":
            assert isinstance(model.ffn, MoE)
            # We store whole steps, so an imported bias is rounded to them.
            return (tensor / model.ffn.bias_step).round().to(torch.int32)
        case _:
            return tensor


def _sizes(model: Model, parts: int, length: int) -> list[int]:
    a = model.attention
    # Three parts are queries, keys and values; two are gate and up, which have the same shape.
    if parts == 3:
        assert isinstance(a, GQA)
        return [heads * a.head_dim for heads in (a.heads, a.kv_heads, a.kv_heads)]
    return [length // parts] * parts


def _interleaved(model: Model, name: str) -> Tensor:
    """Map DeepSeek's rows to ours: it rotates neighbors, we rotate i with i + half."""
    a = model.attention
    assert isinstance(a, MLA)
    queries = name.endswith("q_up.weight")
    heads = a.heads if queries else 1
    fixed = a.nope_dim if queries else a.kv_rank  # rows that are not rotated
    rotated = fixed + torch.arange(a.rope_dim).view(2, -1).T.flatten()
    one = torch.cat((torch.arange(fixed), rotated))
    return (torch.arange(heads)[:, None] * len(one) + one).flatten()


def gather(
    model: Model, family: str, ours: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Convert all tensors from theirs to ours; of `ours` only names and shapes are used."""
    stacks: dict[str, list[Tensor]] = {}
    for row in rows(model, family, ours):
        tensor = from_hub_tensors(model, row, [read(name) for name in row.theirs])
        # Experts come one by one and in order; we stack them.
        if row.expert is not None:
            stack = stacks.setdefault(row.ours, [])
            stack.append(tensor)
            if len(stack) < len(ours[row.ours]):
                continue
            tensor = torch.stack(stacks.pop(row.ours))
        expected = tuple(ours[row.ours].shape)
        if tensor.shape != expected:
            raise DataError(
                f"{row.theirs[0]} has shape {tuple(tensor.shape)} for {row.ours}, but config.json "
                f"makes it {expected}; the files do not belong together"
            )
        yield row.ours, tensor
