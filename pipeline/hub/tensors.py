"""Convert our tensors to Hugging Face's, and back. configs/hub has every family's names."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.parts import GQA, MLA, MoE
from pipeline.config.shape import Model
from pipeline.errors import DataError
from pipeline.hub.families import FAMILIES

Names = dict[str, str]  # our name → their name
TENSORS: dict[str, Names] = {
    family.kind: {ours: name.replace("BASE", family.base) for ours, name in family.tensors.items()}
    for family in FAMILIES
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
    """One tensor of ours, or one expert of it, and the names of its parts in their files."""

    ours: str
    expert: int | None  # index in our stack of experts
    theirs: list[str]
    change: str


def rows(model: Model, family: str, ours: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yield the rows of all our tensors."""
    table = TENSORS[family]
    start = "encoder."
    of_encoder = {key.removeprefix(start): table[key] for key in table if key.startswith(start)}
    for name, tensor in ours.items():
        found = table
        layer = ""
        leaf = name
        if name.startswith("blocks."):
            _, layer, leaf = name.split(".", 2)
        elif name.startswith("encoder.blocks."):
            _, _, layer, leaf = name.split(".", 3)
            found = table | of_encoder
        elif name.startswith("value_embeddings."):  # ours are beside the blocks, theirs inside
            _, layer, leaf = name.split(".", 2)
            leaf = f"value_embeddings.{leaf}"
        elif name.startswith("ahead."):
            if "ahead.join" not in table:  # only training uses these layers
                continue
            _, depth, leaf = name.split(".", 2)
            layer = str(model.layers + int(depth))  # they follow the others
            inner = leaf.startswith("block.")
            leaf = leaf.removeprefix("block.") if inner else f"ahead.{leaf}"
        prefix = f"{found['layers']}.{layer}." if layer else ""
        names = _their_names(found, leaf)
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


def _their_names(table: Names, ours: str) -> list[str]:
    """Return the names of the parts of one of our tensors."""
    stem, _, part = ours.rpartition(".")
    # Our norms have a gain, theirs a weight.
    name = table.get(ours) or f"{table[stem]}.{'weight' if part == 'gain' else part}"
    before, _, rest = name.partition("{")
    parts, _, after = rest.partition("}")
    return [f"{before}{each}{after}" for each in parts.split(",")]


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
    """Convert all tensors from theirs to ours. `ours` gives only names and shapes."""
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
