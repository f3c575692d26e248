"""Our SentencePiece model as a tokenizer.json, so that AutoTokenizer gives the same ids without sentencepiece."""

import json
from pathlib import Path

from tokenizers import AddedToken, decoders
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
        converted = convert(tokenizer)
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


def convert(tokenizer: Tokenizer) -> HubTokenizer:
    out = HubTokenizer.from_str(tokenizer.converted)
    out.decoder = decoders.Sequence(
        [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    out.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in tokenizer.controls]
    )
    return out
