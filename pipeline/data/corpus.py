"""The directory of a corpus: claimed while it is written, checked when it is opened.

A directory belongs to one set of arguments once it is finished, and to one process while it is
written.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.atomic import TEMPORARY, digest, locked, read_regular
from pipeline.config.objective import Objective, Pairs, padded_vocab
from pipeline.config.schema import Data, RunSpec
from pipeline.config.spans import Denoise
from pipeline.data import shards
from pipeline.errors import DataError, RunError, UserError

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer

RECIPE = "recipe.json"
WORK = ".work"  # finished parts of an unfinished corpus
SAMPLE_TOKENS = 120
_RESTORE = "copy it back, or remove the directory and prepare it again"


class Corpus:
    """A shard directory whose files were checked against the manifest."""

    def __init__(self, path: Path, manifest: shards.Manifest) -> None:
        self.path = path  # the directory
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path, verify: bool = False) -> "Corpus":
        """Check that every file exists and has the right size; with verify, also its checksum."""
        corpus = cls(path, shards.Manifest.load(path))
        tokenizer = corpus.manifest.tokenizer
        # First, and always: with another tokenizer, the ids would mean other text.
        corpus._check_file(tokenizer.file, None, tokenizer.fingerprint, verify=True)
        for shard in (shard for s in corpus.manifest.splits.values() for shard in s.shards):
            bin_bytes = shard.tokens * np.dtype(corpus.manifest.dtype).itemsize
            # One i32 length, one i64 offset and one i64 end per document, plus the first end, 0.
            idx_bytes = shards.HEADER.size + 20 * shard.documents + 8
            corpus._check_file(f"{shard.name}.bin", bin_bytes, shard.bin_hash, verify)
            corpus._check_file(f"{shard.name}.idx", idx_bytes, shard.idx_hash, verify)
        return corpus

    def split(self, name: str) -> shards.Split:
        if name not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise DataError(f"{self.path}: split={name!r} does not exist; choose from {known}")
        return self.manifest.splits[name]

    def check(self, config: RunSpec, *splits: str) -> None:
        """Check that the model's vocabulary has every token and every special id of the objective,
        and that the splits are longer than one window."""
        pieces = self.manifest.tokenizer.vocab
        special = config.objective.special_ids
        if config.model.vocab < pieces + special:
            more = f" and the {special:,} special ids of the objective" if special else ""
            raise DataError(
                f"model.vocab={config.model.vocab:,} is below the {pieces:,} of the tokenizer in "
                f"{self.path}{more}; set model.vocab={padded_vocab(pieces, config.objective)}"
            )
        stops = config.objective.stops if isinstance(config.objective, Denoise) else ()
        if max(stops, default=0) >= pieces:
            text = f"objective.stops={max(stops)} is not among the {pieces:,} ids of the tokenizer"
            raise DataError(f"{text} in {self.path}; leave it out, or give ids of its pieces")
        for split in splits:
            if self.split(split).tokens <= config.text_length:
                raise self.too_small(split, config.text_length)

    def check_pairs(self, objective: Objective) -> None:
        """Refuse pairs for an objective that reads running text, and the other way round."""
        columns = self.manifest.pairs
        pairs = isinstance(objective, Pairs)
        wanted = objective.languages if isinstance(objective, Pairs) else ()
        if pairs and not columns:
            raise DataError(
                f'objective.kind="pairs" reads pairs, and {self.path} has none; prepare data with '
                "--pairs SOURCE,TARGET, or choose another objective.kind"
            )
        if columns and not pairs:
            raise DataError(
                f'objective.kind="{objective.kind}" reads running text, and {self.path} has pairs '
                f"of {', '.join(columns)}; leave objective.kind out, or give other data"
            )
        if columns != wanted:
            raise DataError(
                f"objective.languages={','.join(wanted)} are not those of {self.path}, which has "
                f"{','.join(columns)}; prepare it with --pairs {','.join(wanted)}"
            )

    def check_rows(self, length: int, otherwise: str = "") -> None:
        """Check that every document is a row of `length` tokens (data/rows.py)."""
        for shard in (shard for split in self.manifest.splits.values() for shard in split.shards):
            lengths = self.lengths(shard)
            if (lengths[:-1] != length).any() or lengths[-1] != 1:
                raise DataError(
                    f"{self.path}: does not contain examples in rows of {length} tokens; make them "
                    f"with `launch finetune`, whose --seq is the length of a row{otherwise}"
                )

    def check_same(self, data: Data) -> None:
        """Refuse a corpus other than the one that a run started with."""
        if data.hash != self.manifest.hash:
            raise RunError(
                f"data.dir={data.dir} contains other data ({self.manifest.hash}) than the run "
                f"started with ({data.hash}); restore the old data, or give another --out for a "
                f"new run"
            )

    def too_small(self, split: str, seq: int) -> DataError:
        """Return the error for a split that is shorter than one window."""
        remedy = "raise --valid-share in" if split == "valid" else "add text to every source in"
        return DataError(
            f"{self.path}: split {split!r} has {self.split(split).tokens:,} tokens, but a row "
            f"needs {seq + 1:,}; {remedy} `launch data prepare`, or lower model.seq"
        )

    @property
    def tokenizer(self) -> "Tokenizer":
        # Imported here: training opens corpora too, and most runs need no sentencepiece.
        from pipeline.data.tokenizer import Tokenizer

        return Tokenizer.open(self.path / self.manifest.tokenizer.file)

    def sentence_ends(self) -> tuple[int, ...]:
        """Ids of pieces that end a sentence."""
        pieces = self.tokenizer.sentencepiece
        every = range(self.manifest.tokenizer.vocab)
        marks = (".", "!", "?", "\n")
        # A mark that the tokenizer has not learned is encoded as its byte.
        ends = (*marks, *(f"<0x{ord(mark):02X}>" for mark in marks))
        return tuple(i for i in every if pieces.id_to_piece(i).endswith(ends))

    def tokens(self, shard: shards.Shard) -> npt.NDArray[np.integer]:
        """Map the ids of a shard."""
        path = self.path / f"{shard.name}.bin"
        mapped = np.memmap(path, self.manifest.dtype, "r", shape=(shard.tokens,))
        # A plain view: slicing the memmap subclass costs several times as much.
        return np.asarray(mapped)

    def lengths(self, shard: shards.Shard) -> npt.NDArray[np.int32]:
        """Read the tokens of each document, its end included."""
        path = self.path / f"{shard.name}.idx"
        return np.fromfile(path, np.int32, shard.documents, offset=shards.HEADER.size)

    def _check_file(self, name: str, size: int | None, checksum: str, verify: bool) -> None:
        path = self.path / name
        if not path.is_file():
            raise DataError(f"{path}: this file of the corpus is missing; {_RESTORE}")
        found_size = path.stat().st_size
        if size is not None and found_size != size:
            raise DataError(f"{path}: {found_size:,} bytes instead of {size:,}; {_RESTORE}")
        if verify:
            found = digest(path)
            if found != checksum:
                what = f"fingerprint={found}, not {checksum}: damaged or replaced"
                raise DataError(f"{path}: {what}; {_RESTORE}")


def inspect(path: Path) -> dict[str, Any]:
    """Verify every checksum and describe the corpus as plain values."""
    corpus = Corpus.open(path, verify=True)
    manifest = corpus.manifest
    tokenizer = corpus.tokenizer
    splits = manifest.splits.items()
    described: dict[str, Any] = {
        "path": str(path),
        "hash": manifest.hash,
        "dtype": manifest.dtype,
        "tokenizer": manifest.tokenizer.model_dump(),
        "splits": {name: _describe(corpus, split, tokenizer) for name, split in splits},
        "sources": [source.model_dump() for source in manifest.sources],
        "stages": [stage.model_dump(exclude_none=True) for stage in manifest.stages],
        "checksums": "ok",
    }
    if manifest.pairs:
        described["pairs"] = list(manifest.pairs)
    return described


def _describe(corpus: Corpus, split: shards.Split, tokenizer: "Tokenizer") -> dict[str, Any]:
    described: dict[str, Any] = {
        "tokens": split.tokens,
        "documents": split.documents,
        "bytes": split.bytes,
        "shards": len(split.shards),
        "bytes_per_token": round(split.bytes / split.tokens, 4) if split.tokens else None,
    }
    if not split.tokens:
        return described
    counts = np.zeros(tokenizer.vocab, np.int64)
    for shard in split.shards:
        # A few times the shard in memory; shards are at most some hundred megabytes.
        counts += np.bincount(corpus.tokens(shard), minlength=tokenizer.vocab)
    share = counts[counts > 0] / split.tokens
    lengths = np.concatenate([corpus.lengths(shard) for shard in split.shards])
    percentiles = {f"p{q}": int(np.percentile(lengths, q)) for q in (10, 50, 90, 99)}
    most_frequent = np.argsort(-counts, kind="stable")[:10]
    first = split.shards[0]
    sample_tokens = min(SAMPLE_TOKENS, int(corpus.lengths(first)[0]) - 1)
    return described | {
        "pieces_used": int((counts > 0).sum()),
        "unigram_nats_per_token": round(float(-(share * np.log(share)).sum()), 4),
        "document_tokens": percentiles | {"max": int(lengths.max())},
        "most_frequent": [
            [tokenizer.sentencepiece.id_to_piece(int(i)), round(float(counts[i] / split.tokens), 4)]
            for i in most_frequent
        ],
        "sample": tokenizer.decode(corpus.tokens(first)[:sample_tokens]),
    }


# The output directory of `launch data prepare`


def is_finished(out: Path, arguments: dict[str, Any]) -> bool:
    """Check whether `out` has a corpus of these arguments; one of other arguments is an error."""
    remedy = "choose another --out or remove this one"
    try:
        if not (out / shards.MANIFEST).exists():
            return False
    except OSError as error:
        raise shards.write_error(error, out) from error
    try:
        before = json.loads(read_regular(out / RECIPE))
        old = dict(before["recipe"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{out / RECIPE}: damaged; {remedy}") from None
    new = json.loads(json.dumps(arguments["recipe"]))
    # The tokenizer first: vocab_size follows from it.
    for key in sorted(new, key=lambda key: key != "tokenizer"):
        if old.get(key) != new[key]:
            raise DataError(f"out={out}: has {key}={old.get(key)!r}, not {new[key]!r}; {remedy}")
    if before.get("inputs") != arguments["inputs"]:
        raise DataError(f"out={out}: its input files have changed since; {remedy}")
    return True


@contextmanager
def claimed(out: Path, fingerprint: str, warn: Callable[[str], None]) -> Iterator[Path]:
    """Lock the directory and yield the folder for finished parts of a corpus of these arguments."""
    if not shards.has_utf8_name(out):
        raise DataError(f"out={str(out)!r}: the name is not UTF-8; choose another --out")
    work = out / WORK
    try:
        if out.exists() and not out.is_dir():
            raise DataError(f"out={out}: a file, but shards need a directory; choose another --out")
        is_new = not out.exists()
        if not is_new and not work.exists() and any(out.iterdir()):
            raise DataError(f"out={out}: contains other files; choose another --out")
        # From here on the directory is ours: other calls recognize it by .work.
        work.mkdir(parents=True, exist_ok=True)
        with locked(work / "lock") as is_mine:
            if not is_mine:
                raise DataError(f"out={out}: another process is writing there; wait for it")
            mine = work / fingerprint
            mine.mkdir(exist_ok=True)
            for other in work.iterdir():
                if other.is_dir() and other != mine:
                    warn(
                        f"{other}: unfinished work of other arguments or inputs; "
                        "it is deleted when this corpus is finished"
                    )
            for left in work.rglob(f"*{TEMPORARY}"):  # by writers that were killed
                left.unlink(missing_ok=True)
            try:
                yield mine
            except UserError:
                _clean_up(out if is_new else None, work, mine)
                raise
    except OSError as error:
        raise shards.write_error(error, Path(error.filename or out)) from error


def _clean_up(new_out: Path | None, work: Path, mine: Path) -> None:
    # After an error that the user can fix, keep only work that contains a finished shard or sketch.
    if not [*mine.glob("*.idx"), *mine.glob("*.items.npy")]:
        shutil.rmtree(mine, ignore_errors=True)
    if not any(entry.is_dir() for entry in work.iterdir()):
        shutil.rmtree(work)
        if new_out:
            new_out.rmdir()


def publish(work: Path, out: Path, names: Sequence[str], arguments: dict[str, Any]) -> None:
    """Move the files to their place. If this is interrupted, the next call moves the others."""
    for other in work.parent.iterdir():
        if other.is_dir() and other != work:
            shutil.rmtree(other)
    for suffix in ("bin", "idx", "jsonl"):
        for path in out.glob(f"*.{suffix}"):
            # Left by a call with other arguments that was killed here.
            if path.name not in names:
                path.unlink()
    for name in names:
        if (work / name).exists():
            (work / name).rename(out / name)
    # This also flushes the names of the moved files.
    shards.save(out / RECIPE, json.dumps(arguments, indent=1).encode())
