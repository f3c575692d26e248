"""SentencePiece is the reference; gigatoken runs the same model several times faster if ids agree.

Ids are those of sentencepiece, with one exception: it writes a space as U+2581, so a literal U+2581
would be decoded as a space. Lossless models encode that character as bytes, and every text comes
back byte for byte.
"""

import io
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import sentencepiece
import xxhash
from sentencepiece import sentencepiece_model_pb2 as proto

from pipeline.atomic import read_regular
from pipeline.data.clean import normalize
from pipeline.data.corpus_recipe import MB, PAIR, Malformed, Recipe, Task
from pipeline.data.readers import read
from pipeline.data.shards import TokenizerInfo, save, write_error
from pipeline.data.sources import plan
from pipeline.errors import DataError

Ids = npt.NDArray[np.uint32]
_PieceType = proto.ModelProto.SentencePiece

META = "\u2581"  # sentencepiece's spelling of a space
FIXED_PIECES = 3 + 256  # <unk>, <s>, </s> and one piece per byte
MOST_PIECES = 2**24  # sentencepiece counts in 32 bits; the largest vocabularies have 1M pieces
SENTENCE_CHARACTERS = 4096  # cut documents for the trainer: its work per sentence is not linear
DECODE_IDS = 2**16  # ids decoded at once: as Python objects they take several times the memory

# gigatoken 0.10 never removes a word from its cache, so check its memory from time to time.
CACHE_BYTES = 256 * MB
CACHE_CHECK_CHARACTERS = 4 * MB

# The sample that a tokenizer is trained on.
SAMPLE_TASKS = 64  # read from each source, evenly spaced
SAMPLE_BYTES_PER_PIECE = 2500  # of the vocabulary: rare pieces still occur often
SMALLEST_SAMPLE_BYTES = 8 * MB
LARGEST_SAMPLE_BYTES = 256 * MB


class Tokenizer:
    """A SentencePiece model: exactly its ids, with gigatoken's speed where that is safe."""

    def __init__(self, model: bytes, name: str = "tokenizer.model") -> None:
        self.model = model  # the file's bytes
        self.name = name  # for error messages
        self._spec = proto.ModelProto()
        try:
            self._spec.ParseFromString(model)
            if not self._spec.pieces:  # an empty file is a valid message without pieces
                raise ValueError("no pieces")
            self.sentencepiece = sentencepiece.SentencePieceProcessor(model_proto=model)
        # protobuf's DecodeError and sentencepiece's RuntimeError have no common base.
        except Exception as error:
            raise DataError(
                f"{name}: not a SentencePiece model; give another with --tokenizer FILE"
            ) from error
        self.fingerprint = xxhash.xxh3_128_hexdigest(model)
        self.vocab: int = self.sentencepiece.get_piece_size()
        self.eod: int = self.sentencepiece.eos_id()
        self._unchecked_characters = 0  # encoded since the last look at the memory
        self._resident_bytes = 0  # of the process when gigatoken's cache was empty
        if self.eod < 0:
            raise DataError(f"{name}: eos_id=-1; train the model with an eos piece")
        for control in self.controls:
            if self._text_reaches(control):
                text = f"{name}: text that contains {control!r} would become that control piece"
                raise DataError(f"{text}; give another model")

    @classmethod
    def open(cls, path: Path) -> "Tokenizer":
        try:
            return cls(read_regular(path), str(path))
        except OSError as error:
            raise DataError(
                f"tokenizer={path}: cannot be read ({error.strerror}); check the path"
            ) from error

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
        """Pieces that text must never produce, by spelling."""
        types = (_PieceType.CONTROL, _PieceType.UNKNOWN)
        return {piece.piece: i for i, piece in enumerate(self._spec.pieces) if piece.type in types}

    def _text_reaches(self, control: str) -> bool:
        # BPE and character models look up a lone character of any type, word models a word.
        number = self.controls[control]
        if number == self.sentencepiece.unk_id():
            return False
        unigram = self._spec.trainer_spec.model_type == proto.TrainerSpec.UNIGRAM
        return (len(control) == 1 and not unigram) or number in self.sentencepiece.encode(control)

    @cached_property
    def lossless(self) -> bool:
        """Whether decode returns every text: no normalization, bytes for unknown characters."""
        normalizer = self._spec.normalizer_spec
        trainer = self._spec.trainer_spec
        return bool(
            normalizer.name == "identity"
            and not normalizer.precompiled_charsmap
            and normalizer.escape_whitespaces
            and not normalizer.remove_extra_whitespaces
            and not normalizer.add_dummy_prefix
            and not trainer.treat_whitespace_as_suffix
            and trainer.byte_fallback
        )

    @cached_property
    def fast(self) -> bool:
        """Whether gigatoken gives the same ids: lossless BPE models without user-defined pieces."""
        pieces = self._spec.pieces
        bpe = self._spec.trainer_spec.model_type == proto.TrainerSpec.BPE
        user_defined = any(p.type == _PieceType.USER_DEFINED for p in pieces)
        # encode() cuts the text before spaces, so no piece may continue across one.
        words = (p.piece.lstrip(f"{META} ") for p in pieces)
        across_spaces = any(META in word or " " in word for word in words)
        return self.lossless and bpe and not user_defined and not across_spaces

    @cached_property
    def adds_space(self) -> bool:
        """Whether `encode` adds a space before every text, which `decode` removes."""
        return bool(self._spec.normalizer_spec.add_dummy_prefix)

    def encode(self, text: str) -> Ids:
        """Encode words that contain a special string with sentencepiece, the rest with gigatoken.

        No piece of a fast model continues from a character into a space behind it, so the parts of
        a text that is cut there have the same ids as the whole.
        """
        if not self.fast:
            return self._encode_exact(text)
        special = self._controls_or_meta if META in text else self._controls_only
        parts = []
        at = 0
        while found := special.search(text, at):
            before = text[at : found.start()].rpartition(" ")[0].rstrip(" ")
            stop = text.find(" ", found.end())
            if stop < 0:
                stop = len(text)
            parts.append(self._encode_fast(before))
            parts.append(self._encode_exact(text[at + len(before) : stop]))
            at = stop
        rest = self._encode_fast(text[at:] if at else text)
        return np.concatenate([*parts, rest]) if parts else rest

    def _encode_fast(self, text: str) -> Ids:
        self._unchecked_characters += len(text)
        if self._unchecked_characters > CACHE_CHECK_CHARACTERS:
            self._unchecked_characters = 0
            if psutil.Process().memory_info().rss - self._resident_bytes > CACHE_BYTES:
                del self._gigatoken  # with its cache; the next line creates another
        # Only str: invalid bytes crash gigatoken.
        return self._gigatoken.encode(text)  # type: ignore[no-any-return]

    def _encode_exact(self, text: str) -> Ids:
        if not self.lossless:
            return np.asarray(self.sentencepiece.encode(text), np.uint32)
        ids, *rest = self.sentencepiece.encode(text.split(META))
        for part in rest:
            ids += self._meta_bytes + part
        return np.asarray(ids, np.uint32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Return the text. Ids that a run adds to the tokenizer's, such as T5's sentinels, become
        <0>, <1>, …"""
        text = ""
        for added, part in itertools.groupby(map(int, ids), lambda id: id >= self.vocab):
            if added:
                text += "".join(f"<{id - self.vocab}>" for id in part)
            else:
                text += self.sentencepiece.decode(list(part))
        return text

    def text_bytes(self, ids: Ids) -> bytes:
        """Return the text of the ids; a lossless tokenizer returns exactly the bytes it encoded."""
        parts = []
        for start in range(0, len(ids), DECODE_IDS):
            block = ids[start : start + DECODE_IDS].tolist()
            parts.append(b"".join([self._piece_bytes[number] for number in block]))
        return b"".join(parts)

    @cached_property
    def _piece_bytes(self) -> list[bytes]:
        controls = set(self.controls.values())
        found = []
        for i, piece in enumerate(self._spec.pieces):
            if i in controls:
                found.append(b"")
            elif piece.type == _PieceType.BYTE:
                found.append(bytes.fromhex(piece.piece[3:5]))  # spelled <0x41>
            else:
                found.append(piece.piece.replace(META, " ").encode())
        return found

    # gigatoken reads a control piece that is spelled out in the text as the piece itself. The
    # pattern without META is eight times as fast.
    @cached_property
    def _controls_only(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.controls)))

    @cached_property
    def _controls_or_meta(self) -> re.Pattern[str]:
        return re.compile(f"{self._controls_only.pattern}|{META}")

    @cached_property
    def _meta_bytes(self) -> list[int]:
        return [self.sentencepiece.piece_to_id(f"<0x{byte:02X}>") for byte in META.encode()]

    @cached_property
    def _gigatoken(self):  # type: ignore[no-untyped-def]
        import gigatoken

        made = gigatoken.Tokenizer.from_json(self.converted)
        self._resident_bytes = psutil.Process().memory_info().rss
        return made

    @cached_property
    def converted(self) -> str:
        """The model as a tokenizer.json, which gigatoken reads; its ids are the same if `fast`.

        Raises ValueError for models that cannot be converted, such as unigram models."""
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        return sentencepiece_to_tokenizer_json(self.model)  # type: ignore[no-any-return]


# Training


def check_vocab_size(vocab: int, controls: Sequence[str]) -> None:
    smallest = FIXED_PIECES + len(controls) + 1
    if not smallest <= vocab <= MOST_PIECES:
        limits = f"{smallest}, the byte and control pieces alone, and {MOST_PIECES:,}"
        raise DataError(f"vocab-size={vocab:,} is not between {limits}; try 4096")


def train(
    texts: Iterable[str], vocab: int, *, kind: str = "bpe", controls: Sequence[str] = ()
) -> bytes:
    """Train a lossless model; the same texts give the same bytes for any number of threads."""
    check_vocab_size(vocab, controls)
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
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
            num_threads=2,  # more do not change the result
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"vocab-size={vocab:,}: {_explain(str(error))}") from error
    return out.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        # The trainer drops a whole sentence that contains NUL, and reads U+2581 as a space. The
        # parts of a pair are sentences of their own.
        for part in re.split(f"[\0{META}{PAIR}]", text):
            for start in range(0, len(part), SENTENCE_CHARACTERS):
                yield part[start : start + SENTENCE_CHARACTERS]


def _explain(message: str) -> str:
    # sentencepiece reports the limit only in the text of its message.
    too_large = re.search(r"value <= (\d+)", message)
    if too_large:
        return f"this text supports at most {int(too_large[1]):,}; use that or add text"
    too_small = re.search(r"required_chars. \d+ vs (\d+)", message)
    if too_small:
        return f"too small for every frequent character; use at least {int(too_small[1]):,}"
    if "sentences_.empty()" in message or "is_empty" in message:
        return "no text to train a tokenizer on; check --source"
    return f"training the tokenizer failed: {message.splitlines()[-1]}"


def make_tokenizer(recipe: Recipe, out: Path) -> Tokenizer:
    """Train on the recipe's sources and write the model. A different existing file is kept."""
    try:
        if out.is_dir():
            raise DataError(f"out={out}: this is a directory; name the .model file to write")
        tasks = plan(recipe.sources, limit_bytes=recipe.limit_bytes, seed=recipe.seed)
        made = Tokenizer(train_on(tasks, recipe), str(out))
        if out.exists() and out.read_bytes() != made.model:
            text = f"out={out}: exists and is another tokenizer, which shards may depend on"
            raise DataError(f"{text}; choose another name")
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(error, out) from error
    save(out, made.model)
    return made


def train_on(tasks: Sequence[Task], recipe: Recipe) -> bytes:
    options = recipe.train
    texts = _sample(tasks, recipe)
    return train(texts, recipe.vocab_size, kind=options.kind, controls=options.controls)


def _sample(tasks: Sequence[Task], recipe: Recipe) -> Iterator[str]:
    """Yield documents from evenly spaced tasks; within a task the seed decides the order."""
    by_vocab = max(SMALLEST_SAMPLE_BYTES, SAMPLE_BYTES_PER_PIECE * recipe.vocab_size)
    budget = recipe.train.sample_bytes or min(by_vocab, LARGEST_SAMPLE_BYTES)
    shares = _sample_shares(tasks, recipe.mixture.weights if recipe.mixture else None)
    malformed = None
    found_text = False
    for source, share in shares.items():
        mine = [task for task in tasks if task[0].source == source]
        # All sources and all parts of a source are represented.
        count = min(len(mine), SAMPLE_TASKS)
        for number in range(count):
            task = mine[number * len(mine) // count]
            left = budget * share / count
            pieces = random.Random(f"{recipe.seed} {source} {number}").sample(task, len(task))
            texts = (read(piece, recipe.columns) for piece in pieces)
            for text in itertools.chain.from_iterable(texts):
                if isinstance(text, Malformed):
                    malformed = malformed or text
                    continue
                found_text = True
                yield normalize(text, recipe.normalise)
                left -= len(text)
                if left <= 0:
                    break
    if malformed and not found_text:
        problem = f"sources={', '.join(shares)}: no text to train a tokenizer on"
        raise DataError(f"{problem}; the first document is {malformed.where}")


def _sample_shares(tasks: Sequence[Task], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return each source's share of the sample: by the mixture's weights, or by size."""
    sizes: dict[str, float] = {}
    for piece in itertools.chain.from_iterable(tasks):
        sizes[piece.source] = sizes.get(piece.source, 0) + piece.bytes
    chosen = {source: weights.get(source, 0) for source in sizes} if weights else sizes
    total = max(sum(chosen.values()), 1e-300)
    return {source: weight / total for source, weight in chosen.items()}
