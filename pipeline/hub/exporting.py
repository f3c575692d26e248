"""A run as a Hugging Face directory: config.json, safetensors shards with their index, tokenizer files.

The directory is written under a temporary name, loaded by transformers and compared with our own logits, and
only then renamed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as HubTokenizer
from torch import Tensor

from pipeline.config.parts import MoE
from pipeline.config.shape import Model
from pipeline.data.tokenizer import META, Tokenizer
from pipeline.errors import DataError
from pipeline.hub.families import Family, choose_family, to_hub_config
from pipeline.hub.importing import appearing, held
from pipeline.hub.tensors import out, rows
from pipeline.model.stack import Decoder

_PROBES = (
    "The quick brown fox\n\tjumps over 1,234 lazy dogs.  Two spaces,   three; naïve café, Größe, 東京, 🦊!",
    "def f(x: int) -> int:\n    return x * 2  # ✓\n\n\nclass A:\n        pass\r\n",
    " leading and trailing ",
    "aaaaaaaaaaaaaaaaaaaa 0000000000 ------------- \0\x07",
)


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.model as it is, and where it is lossless BPE also tokenizer.json, held against it."""
    (directory / "tokenizer.model").write_bytes(tokenizer.model)
    special = {
        "unk_token": "<unk>",
        "eos_token": tokenizer.sentencepiece.id_to_piece(tokenizer.eod),
    }
    about = {
        **special,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if tokenizer.fast:
        converted = to_tokenizer_json(tokenizer)
        for text in _PROBES:
            if (
                converted.encode(text, add_special_tokens=False).ids
                != tokenizer.encode(text).tolist()
            ):
                raise DataError(
                    f"{tokenizer.name}: tokenizer.json gives other ids for {text[:20]!r}; export refused"
                )
        converted.save(str(directory / "tokenizer.json"))
    else:
        about |= {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(about, indent=1) + "\n", encoding="utf-8"
    )


def to_tokenizer_json(tokenizer: Tokenizer) -> HubTokenizer:
    out = HubTokenizer.from_str(tokenizer.converted)
    out.decoder = decoders.Sequence(
        [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    out.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in tokenizer.controls]
    )
    return out


_SHARD_BYTES = 5_000_000_000  # as transformers cuts them


class Exported(NamedTuple):
    architecture: str
    tensors: int
    bytes: int
    difference: float


def export(
    model: Decoder,
    directory: Path,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype,
    shard_bytes: int = _SHARD_BYTES,
) -> Exported:
    """Refuses what has no counterpart before anything is written, and to finish unless the logits agree."""
    family = choose_family(model.cfg)
    with appearing(directory, "--to") as aside:
        with torch.no_grad():
            for (
                tensor
            ) in model.parameters():  # both sides of the comparison have the exported precision
                tensor.copy_(tensor.to(dtype))
        count, size = _write_tensors(theirs(model, family, dtype), aside, shard_bytes)
        (aside / "config.json").write_text(
            json.dumps(_config(model.cfg, family, tokenizer, dtype), indent=1) + "\n"
        )
        if tokenizer is not None:
            write_tokenizer(tokenizer, aside)
        return Exported(family.architecture, count, size, held(model, aside, f"--to {directory}"))


def theirs(model: Decoder, family: Family, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name on the Hub, one at a time."""
    cfg, ours = model.cfg, model.state_dict()
    if cfg.tied:
        ours.pop("head.weight")
    for row in rows(cfg, family.kind, ours):
        for name, tensor in zip(row.theirs, out(cfg, row, ours[row.ours]), strict=True):
            yield name, tensor.to(torch.float32 if row.how == "bias" else dtype)
    if isinstance(cfg.ffn, MoE) and cfg.ffn.router == "sigmoid" and not cfg.ffn.bias_step:
        for layer in filter(cfg.routed, range(cfg.layers)):  # theirs always has one
            yield (
                f"model.layers.{layer}.mlp.gate.e_score_correction_bias",
                torch.zeros(cfg.ffn.experts),
            )


def _write_tensors(
    tensors: Iterator[tuple[str, Tensor]], directory: Path, shard_bytes: int
) -> tuple[int, int]:
    shards: list[list[str]] = []
    total, held, held_bytes = 0, dict[str, Tensor](), 0

    def flush() -> None:
        nonlocal held, held_bytes
        if held:
            save_file(held, directory / f"{len(shards)}.part", metadata={"format": "pt"})
            shards.append(list(held))
            held, held_bytes = {}, 0

    for name, tensor in tensors:
        if held_bytes + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.contiguous().clone()  # safetensors wants no two to share memory
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (directory / "0.part").rename(directory / "model.safetensors")
    else:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        for i, file in enumerate(files):
            (directory / f"{i}.part").rename(directory / file)
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return sum(map(len, shards)), total


def _config(
    cfg: Model, family: Family, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> dict[str, Any]:
    end = None if tokenizer is None else tokenizer.eod
    ids = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
    }  # a document begins after another's end
    return {
        **to_hub_config(cfg, family),
        **ids,
        "dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
