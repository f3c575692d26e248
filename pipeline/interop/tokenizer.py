"""Our SentencePiece model as a tokenizer.json, so that AutoTokenizer gives the same ids without sentencepiece."""

import json
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HubTokenizer

from pipeline.data.tokenizer import META, Tokenizer
from pipeline.errors import DataError

_PROBES = (
    "The quick brown fox\n\tjumps over 1,234 lazy dogs.  Two spaces,   three; naïve café, Größe, 東京, 🦊!",
    "def f(x: int) -> int:\n    return x * 2  # ✓\n\n\nclass A:\n        pass\r\n",
    " leading and trailing ",
    "aaaaaaaaaaaaaaaaaaaa 0000000000 ------------- \0\x07",
)


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.model as it is, and where it is lossless BPE also tokenizer.json, held against it."""
    (directory / "tokenizer.model").write_bytes(tokenizer.model)
    special = {"unk_token": "<unk>", "eos_token": tokenizer.sentencepiece.id_to_piece(tokenizer.eod)}
    about = {**special, "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.fast:
        converted = convert(tokenizer)
        for text in _PROBES:
            if converted.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
                raise DataError(f"{tokenizer.name}: tokenizer.json gives other ids for {text[:20]!r}; export refused")
        converted.save(str(directory / "tokenizer.json"))
    else:
        about |= {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def convert(tokenizer: Tokenizer) -> HubTokenizer:
    """The same merges: every way to split a piece into two others, best piece first, as SentencePiece ranks them."""
    pieces = {tokenizer.sentencepiece.id_to_piece(i): i for i in range(tokenizer.vocab)}
    spec = proto.ModelProto.FromString(tokenizer.model)
    normal = {p.piece: p.score for p in spec.pieces if p.type == proto.ModelProto.SentencePiece.NORMAL}
    splits = (
        (-score, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, score in normal.items()
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    )
    merges = [(left, right) for *_, left, right in sorted(splits)]
    out = HubTokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    out.normalizer = normalizers.Replace(" ", META)
    out.decoder = decoders.Sequence([decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()])
    out.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in tokenizer.controls])
    return out
