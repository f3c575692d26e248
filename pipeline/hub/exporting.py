"""Export a model as a Hugging Face directory: config.json, safetensors files, tokenizer files.

The directory is written under a temporary name, loaded by transformers and compared with our own
logits. It gets its final name only if they agree.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import AddedToken, decoders, processors
from tokenizers import Tokenizer as HubTokenizer
from torch import Tensor

from pipeline.config.objective import Labels
from pipeline.config.parts import MoE
from pipeline.config.shape import Model
from pipeline.data.tokenizer import META, Tokenizer
from pipeline.hub import sequences
from pipeline.hub.families import Family, to_hub_config
from pipeline.hub.importing import CONFIG, SPIECE, TOKENIZER, check_logits, new_directory
from pipeline.hub.tensors import rows, to_hub_tensors
from pipeline.model.stack import Decoder

# The files of our own class, which config.json's auto_map names. They import nothing else of ours.
CODE = ("configuration_isoflop.py", "modeling_isoflop.py")
_SHARD_BYTES = 5_000_000_000  # the default of transformers
# Texts that reveal a wrong conversion: runs of spaces, digits, bytes outside the vocabulary.
_PROBES = (
    "The quick brown fox\n\tjumps over 1,234 lazy dogs.  Two spaces,   three;",
    " naïve café, Größe, 東京, 🦊!",
    "def f(x: int) -> int:\n    return x * 2  # ✓\n\n\nclass A:\n        pass\r\n",
    " leading and trailing ",
    "aaaaaaaaaaaaaaaaaaaa 0000000000 ------------- \0\x07",
)


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
    labels: Labels | None = None,
) -> Exported:
    """Write the directory. A model without a counterpart is refused before anything is written.
    A model with labels becomes transformers' class for sequences."""
    if model.generator is not None:
        model.drop_generator()
    family = sequences.export_family(model.cfg, labels)
    with new_directory(directory, "--to") as temporary:
        with torch.no_grad():
            for parameter in model.parameters():  # so that the check compares the exported numbers
                parameter.copy_(parameter.to(dtype))
        # safetensors refuses tensors that share memory.
        tensors = {name: tensor.clone() for name, tensor in hub_state(model, family, dtype)}
        save_torch_state_dict(tensors, temporary, max_shard_size=shard_bytes)
        size = sum(tensor.nbytes for tensor in tensors.values())
        config = hub_config(model.cfg, family, tokenizer, dtype)
        if labels is not None:
            config |= sequences.sequence_config(labels, tokenizer)
        _write_json(temporary / CONFIG, config)
        if family.kind == "isoflop":
            for name in CODE:
                shutil.copyfile(Path(__file__).with_name(name), temporary / name)
        if tokenizer is not None:
            _write_tokenizer(tokenizer, temporary, labels)
        # safetensors writes mode 0600; the mode of a new directory shows the user's umask.
        mode = temporary.stat().st_mode & 0o666
        for path in temporary.iterdir():
            path.chmod(mode)
        difference = check_logits(model, family, temporary, f"--to {directory}", labels)
    return Exported(family.architecture, len(tensors), size, difference)


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def hub_config(
    cfg: Model, family: Family, tokenizer: Tokenizer | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the content of config.json."""
    # A document begins after the end of another, so bos and eos are the same token.
    end = None if tokenizer is None else tokenizer.eod
    name = str(dtype).removeprefix("torch.")
    starts = {"decoder_start_token_id": end} if cfg.source_layers and end is not None else {}
    return {
        **starts,
        "pad_token_id": None,
        **to_hub_config(cfg, family),
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": name,
        "torch_dtype": name,  # the key before transformers 4.56
        "use_cache": True,
    }


# ── Weights ──────────────────────────────────────────────────────────────────────────────────────


def hub_state(model: Decoder, family: Family, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its name on the Hub, one at a time."""
    cfg = model.cfg
    ours = model.state_dict()
    if cfg.tied:
        ours.pop("head.weight")
    if family.architecture.endswith(sequences.SEQUENCES):
        yield from sequences.sequence_head(family, ours)
    for row in rows(cfg, family.kind, ours):
        tensors = to_hub_tensors(cfg, row, ours[row.ours])
        for name, tensor in zip(row.theirs, tensors, strict=True):
            # The router's bias stays in fp32, because bf16 is too coarse for its small steps.
            yield name, tensor.to(torch.float32 if row.change == "bias" else dtype)
    if family.kind == "isoflop" or not isinstance(cfg.ffn, MoE):
        return
    if cfg.ffn.router == "sigmoid" and not cfg.ffn.bias_step:
        for layer in filter(cfg.routed, range(cfg.layers)):  # transformers always has a bias
            name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            yield name, torch.zeros(cfg.ffn.experts)


# ── Tokenizer ────────────────────────────────────────────────────────────────────────────────────


def _write_tokenizer(tokenizer: Tokenizer, directory: Path, labels: Labels | None) -> None:
    """Write the SentencePiece model, and a tokenizer.json if one can give the same ids."""
    converted = _to_hub_tokenizer(tokenizer)
    if converted is None:
        # From a tokenizer.model, transformers would make its own, with other ids.
        (directory / SPIECE).write_bytes(tokenizer.model)
        return
    (directory / TOKENIZER).write_bytes(tokenizer.model)
    about: dict[str, Any] = {
        "unk_token": "<unk>",
        "eos_token": tokenizer.sentencepiece.id_to_piece(tokenizer.eod),
        "clean_up_tokenization_spaces": False,
        # Otherwise transformers 4 adds token_type_ids, which no decoder accepts.
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if labels is not None:
        about["pad_token"] = tokenizer.sentencepiece.id_to_piece(sequences.padding_id(tokenizer))
    if labels is not None and labels.reads == "last":
        end = about["eos_token"]
        # Each text and its end, as in training (objective/example.py).
        converted.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eod)]
        )
    converted.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", about)


def _to_hub_tokenizer(tokenizer: Tokenizer) -> HubTokenizer | None:
    """Return a tokenizer with the same ids; None if that is impossible, as for unigram models."""
    try:
        out = HubTokenizer.from_str(tokenizer.converted)
    except ValueError:
        return None
    # Undo SentencePiece's encoding: its mark for spaces, then bytes, then one string.
    parts = [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()]
    if tokenizer.adds_space:
        parts.append(decoders.Strip(" ", 1, 0))
    out.decoder = decoders.Sequence(parts)
    for text in _PROBES:
        ids = tokenizer.encode(text).tolist()
        same = out.encode(text, add_special_tokens=False).ids == ids
        if not same or out.decode(ids) != tokenizer.decode(ids):
            return None
    controls = [AddedToken(text, normalized=False, special=True) for text in tokenizer.controls]
    out.add_special_tokens(controls)
    return out
