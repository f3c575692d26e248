"""SentencePiece is the truth; gigatoken runs the same model file several times faster where the ids are equal.

Ids are those of sentencepiece, with one exception that it needs itself: it spells a space as U+2581, so that a literal
U+2581 would come back as a space. Lossless models get that character in bytes, and every text returns byte for byte.
"""

import io
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import sentencepiece
import xxhash
from sentencepiece import sentencepiece_model_pb2 as proto

from pipeline.data.piece import MB
from pipeline.data.shards import TokenizerInfo
from pipeline.errors import DataError

Ids = npt.NDArray[np.uint32]

META = "\u2581"
EOD = "</s>"
FIXED = 3 + 256  # <unk>, <s>, </s> and one piece per byte
SENTENCE_CHARACTERS = 4096  # documents are handed to the trainer in cuts of this length: its work per cut is not linear
CACHE_BYTES, CACHE_CHECK = (
    256 * MB,
    4 * MB,
)  # gigatoken 0.10 forgets no word it ever saw; looked at every so much text


class Tokenizer:
    """A SentencePiece model, its ids exactly, at gigatoken's speed where that is safe."""

    def __init__(self, model: bytes, name: str = "tokenizer.model") -> None:
        self.model, self.name = model, name
        self._spec = proto.ModelProto()
        try:
            self._spec.ParseFromString(model)
            self.sentencepiece = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (
            Exception
        ) as error:  # protobuf's DecodeError and sentencepiece's RuntimeError share no base
            raise DataError(
                f"{name}: not a SentencePiece model; give another, or --vocab-size to train one"
            ) from error
        self.fingerprint = xxhash.xxh3_128_hexdigest(model)
        self._unchecked = self._resident = 0
        self.vocab: int = self.sentencepiece.get_piece_size()
        self.eod: int = self.sentencepiece.eos_id()
        if self.eod < 0:
            raise DataError(
                f"{name}: eos_id=-1, but documents need an end; train the model with an eos piece"
            )
        if reached := next(filter(self._reached, self.controls), None):
            raise DataError(
                f"{name}: text with {reached!r} in it would become that control piece; give another model"
            )

    @classmethod
    def open(cls, path: Path) -> "Tokenizer":
        try:
            return cls(path.read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"{path}: cannot read the tokenizer ({error.strerror})") from error

    def info(self, file: str) -> TokenizerInfo:
        return TokenizerInfo(
            file=file,
            fingerprint=self.fingerprint,
            vocab=self.vocab,
            eod=self.eod,
            controls=self.controls,
        )

    @cached_property
    def controls(self) -> dict[str, int]:
        """Pieces that text must never produce, by their spelling."""
        never = (proto.ModelProto.SentencePiece.CONTROL, proto.ModelProto.SentencePiece.UNKNOWN)
        return {piece.piece: i for i, piece in enumerate(self._spec.pieces) if piece.type in never}

    def _reached(self, control: str) -> bool:
        """BPE and character models look up a lone character whatever its kind, word models the first word."""
        alone = (
            len(control) == 1 and self._spec.trainer_spec.model_type != proto.TrainerSpec.UNIGRAM
        )
        return self.controls[control] != self.sentencepiece.unk_id() and (
            alone or self.controls[control] in self.sentencepiece.encode(control)
        )

    @cached_property
    def lossless(self) -> bool:
        """Whether decode gives back every text: identity normalization, all spaces, bytes for unknown characters."""
        spec, trainer = self._spec.normalizer_spec, self._spec.trainer_spec
        plain = (
            spec.name == "identity" and not spec.precompiled_charsmap and spec.escape_whitespaces
        )
        return bool(
            plain
            and not spec.remove_extra_whitespaces
            and not spec.add_dummy_prefix
            and not trainer.treat_whitespace_as_suffix
            and trainer.byte_fallback
        )

    @cached_property
    def fast(self) -> bool:
        """Whether gigatoken gives the same ids: so measured for lossless BPE models without user-defined pieces."""
        own = any(p.type == proto.ModelProto.SentencePiece.USER_DEFINED for p in self._spec.pieces)
        words = (p.piece.lstrip(f"{META} ") for p in self._spec.pieces)
        across = any(META in word or " " in word for word in words)  # encode cuts there
        return (
            self.lossless
            and not own
            and not across
            and self._spec.trainer_spec.model_type == proto.TrainerSpec.BPE
        )

    def encode(self, text: str) -> Ids:
        """Words with a special string in them go through sentencepiece, all others through gigatoken where it is safe.

        No piece of a fast model runs from a character into a space behind it: cut there, the parts have the same ids.
        """
        if not self.fast:
            return self._encode_exact(text)
        parts, at, special = [], 0, self._special[META in text]
        while found := special.search(text, at):
            before = text[at : found.start()].rpartition(" ")[0].rstrip(" ")
            stop = text.find(" ", found.end()) % (len(text) + 1)  # -1: the end
            parts += [self._encode_fast(before), self._encode_exact(text[at + len(before) : stop])]
            at = stop
        rest = self._encode_fast(text[at:] if at else text)
        return np.concatenate([*parts, rest]) if parts else rest

    def _encode_fast(self, text: str) -> Ids:
        self._unchecked += len(text)
        if self._unchecked > CACHE_CHECK:
            self._unchecked = 0
            if psutil.Process().memory_info().rss - self._resident > CACHE_BYTES:
                del self._gigatoken  # and its cache; the next line makes another
        return self._gigatoken.encode(text)  # type: ignore[no-any-return]  # untyped; str only: invalid bytes crash it

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        return self.sentencepiece.decode([int(i) for i in ids])  # type: ignore[no-any-return]

    @cached_property
    def _special(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Where gigatoken differs: it takes a control piece that is spelt out in the text for the piece itself."""
        controls = "|".join(map(re.escape, self.controls))
        return re.compile(controls), re.compile(
            f"{controls}|{META}"
        )  # the first is found eight times as fast

    @cached_property
    def converted(self) -> str:
        """A fast model as gigatoken takes it: what its own converter gives in twice the time, as it parses anew."""
        from gigatoken._load.sentencepiece import _generate_merges

        vocab = {piece.piece: i for i, piece in enumerate(self._spec.pieces)}
        kinds = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        control = proto.ModelProto.SentencePiece.CONTROL
        added = [
            {"id": vocab[p.piece], "content": p.piece} | kinds
            for p in self._spec.pieces
            if p.type == control
        ]
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": META}
        bpe = {
            "type": "BPE",
            "unk_token": self._spec.trainer_spec.unk_piece,
            "fuse_unk": True,
            "byte_fallback": True,
        }
        bpe |= {
            "vocab": vocab,
            "merges": _generate_merges(vocab, {p.piece: p.score for p in self._spec.pieces}),
        }
        normalizer = {"type": "Sequence", "normalizers": [spaces]}
        made = {"version": "1.0", "added_tokens": added, "normalizer": normalizer, "model": bpe}
        return json.dumps(made, ensure_ascii=False)

    @cached_property
    def _gigatoken(self):  # type: ignore[no-untyped-def]
        import gigatoken

        made = gigatoken.Tokenizer.from_json(self.converted)
        self._resident = psutil.Process().memory_info().rss
        return made

    @cached_property
    def _meta_bytes(self) -> list[int]:
        return [self.sentencepiece.piece_to_id(f"<0x{byte:02X}>") for byte in META.encode()]

    def _encode_exact(self, text: str) -> Ids:
        if not self.lossless:
            return np.asarray(self.sentencepiece.encode(text), np.uint32)
        first, *rest = self.sentencepiece.encode(text.split(META))
        for part in rest:
            first += self._meta_bytes + part
        return np.asarray(first, np.uint32)


def train(
    texts: Iterable[str], vocab: int, *, kind: str = "bpe", controls: Sequence[str] = ()
) -> bytes:
    """Train a lossless model: same texts, same bytes out, whatever the number of threads."""
    smallest = FIXED + len(controls) + 1
    if vocab < smallest:
        raise DataError(
            f"vocab-size={vocab:,} is below {smallest}, the bytes and control pieces alone; try 4096"
        )
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_cuts(texts),
            model_writer=out,
            vocab_size=vocab,
            model_type=kind,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,  # it would put a space before every document
            allow_whitespace_only_pieces=True,  # indentation in one token
            split_digits=True,
            control_symbols=list(controls),
            max_sentence_length=SENTENCE_CHARACTERS * 4,
            num_threads=2,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_explain(str(error), vocab)) from error
    return out.getvalue()


def _cuts(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        # The trainer drops a whole cut that holds a NUL, and takes U+2581 for a space.
        for part in re.split(f"[\0{META}]", text):
            for start in range(0, len(part), SENTENCE_CHARACTERS):
                yield part[start : start + SENTENCE_CHARACTERS]


def _explain(message: str, vocab: int) -> str:
    if limit := re.search(r"value <= (\d+)", message):
        return f"vocab-size={vocab:,} is more than this text supports; use at most {int(limit[1]):,} or add text"
    if limit := re.search(r"required_chars. \d+ vs (\d+)", message):
        return f"vocab-size={vocab:,} does not hold every frequent character; use at least {int(limit[1]):,}"
    if "sentences_.empty()" in message or "is_empty" in message:
        return f"vocab-size={vocab:,}: no text to train a tokenizer on; check --source"
    return f"vocab-size={vocab:,}: training the tokenizer failed: {message.splitlines()[-1]}"
