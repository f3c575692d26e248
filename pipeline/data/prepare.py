"""From sources to a corpus: plan, tokenizer, passes over the text on Ray, manifest last.

What a task has finished stays under .work by the fingerprint of all that decides its bytes, so that a call after
Ctrl-C, a lost worker or a power cut does only what is missing, and ends in the same bytes.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from pipeline.config.parts import Frozen
from pipeline.data import synthetic
from pipeline.data.claim import WORK, claimed, finished, publish
from pipeline.data.cluster import cluster, run
from pipeline.data.dedup import deduplicate
from pipeline.data.files import replacing, save
from pipeline.data.mixture import check, mixed
from pipeline.data.normalise import normalise
from pipeline.data.permute import U64
from pipeline.data.piece import Task
from pipeline.data.read import Malformed, read, tokens_not_text
from pipeline.data.recipe import Dedup, Recipe
from pipeline.data.sample import train_on
from pipeline.data.shards import VERSION, Corpus, Manifest, SourceShare, Split, Stage, dtype_for
from pipeline.data.shingles import ngrams, word_hashes
from pipeline.data.sketch import Sketched, sketch
from pipeline.data.sources import plan
from pipeline.data.stages import Position, total
from pipeline.data.tokenize import CONVERTED, MODEL, SPLITS, Done, tokenize
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError

ASIDE = "malformed.jsonl"
MALFORMED_SHARE = (
    0.01  # of the documents; more is taken for the wrong file rather than for a few bad lines
)
FEWEST_WORDS = (
    8  # of a held-out text, as in GPT-3's appendix C: fewer stand in many a document by chance
)

Report = Callable[[str, int, int], None]  # what, bytes done, bytes in all
Record = TypeVar("Record", bound=Frozen)


@dataclass(frozen=True)
class Job:
    """What every step of one preparation needs to know."""

    recipe: Recipe
    tasks: Sequence[Task]
    work: Path  # every file is made here
    workers: int | None
    report: Report

    @property
    def names(self) -> list[str]:
        return [f"{number:05d}" for number in range(len(self.tasks))]


def prepare(
    recipe: Recipe,
    out: Path,
    *,
    model: bytes | None = None,
    workers: int | None = None,
    malformed_share: float = MALFORMED_SHARE,
    report: Report = lambda *_: None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Manifest, bool]:
    """Make the corpus, or finish it; returns its manifest and whether it was already there."""
    tasks = plan(recipe.sources, limit_bytes=recipe.limit_bytes, seed=recipe.seed, out=out, say=say)
    if not tasks:
        raise _empty(recipe)
    check(recipe.mixture, recipe.sources)
    if taken := [
        piece
        for task in tasks
        for piece in task
        if piece.kind == "megatron" and not recipe.as_it_is
    ]:
        raise tokens_not_text(taken[0])
    against = _held_out_tasks(recipe, out, say)
    inputs = xxhash.xxh3_128_hexdigest(
        repr([[astuple(piece) for piece in task] for task in [*tasks, *against]]).encode()
    )
    fingerprint = recipe.fingerprint(inputs)
    arguments = {"recipe": recipe.model_dump(mode="json"), "inputs": inputs}
    if finished(out, arguments):
        report("verify", 0, 1)
        manifest = Corpus.open(out, verify=True).manifest
        report("verify", 1, 1)
        shutil.rmtree(
            out / WORK, ignore_errors=True
        )  # a kill between the manifest and this left it
        return manifest, True
    with claimed(out, fingerprint, say) as work:
        job = Job(recipe, tasks, work, workers, report)
        with cluster(workers):
            tokenizer = _tokenizer(job, model)
            held_out = _held_out(job, against, say)
            counted = _deduplicate(job, malformed_share)
            done = _tokenize(job, held_out, dedup=counted is not None)
        stages = total([counted or (), *(d.stages for d in done)])
        _check_read(job, stages, [d.malformed for d in done], malformed_share)
        manifest = _manifest(job, done, stages, tokenizer, fingerprint)
        shards = [
            f"{s.name}.{suffix}"
            for d in done
            for s in d.shards.values()
            for suffix in ("bin", "idx")
        ]
        publish(work, out, [*shards, *_set_aside(job, done), MODEL], arguments)
        sealed = manifest.save(out)
        shutil.rmtree(out / WORK, ignore_errors=True)
        return sealed, False


def _empty(recipe: Recipe) -> DataError:
    return DataError(f"sources={', '.join(recipe.sources)}: no text in them; every file is empty")


def _held_out_tasks(recipe: Recipe, out: Path, say: Callable[[str], None]) -> list[Task]:
    def named(line: str) -> str:
        return line.replace("source=", "decontaminate.against=", 1)

    if recipe.decontaminate is None:
        return []
    try:
        return plan(
            recipe.decontaminate.against,
            limit_bytes=None,
            seed=0,
            out=out,
            say=lambda line: say(named(line)),
        )
    except DataError as error:
        raise DataError(named(str(error))) from error


def _tokenizer(job: Job, model: bytes | None) -> Tokenizer:
    path = job.work / MODEL
    if not path.exists():
        if model is None:
            job.report("tokenizer", 0, 1)
            [model] = run(train_on, [(list(job.tasks), job.recipe)])
            job.report("tokenizer", 1, 1)
        save(path, model)
    tokenizer = Tokenizer.open(path)
    if tokenizer.fast:  # once, not in every worker
        save(job.work / CONVERTED, tokenizer.converted.encode())
    return tokenizer


def _held_out(job: Job, against: Sequence[Task], say: Callable[[str], None]) -> Path | None:
    """All n-grams of the texts that must not be trained on, by n, sorted, in one small file; of a text with fewer than
    n words, all of them."""
    if job.recipe.decontaminate is None:
        return None
    path, n = job.work / "held-out.npz", job.recipe.decontaminate.ngram
    if not path.exists():
        grams: dict[int, list[U64]] = {}
        texts = short = 0
        for item in (
            item for task in against for piece in task for item in read(piece, job.recipe.text_key)
        ):
            if isinstance(item, Malformed):  # what is not read would be trained on
                raise DataError(
                    f"decontaminate.against: {item.path} at {item.position:,}: {item.reason}; mend it"
                )
            words = word_hashes(normalise(item, job.recipe.normalise).encode())
            texts, k = texts + 1, min(n, len(words))
            if k < min(n, FEWEST_WORDS):
                short += 1
            else:
                grams.setdefault(k, []).append(ngrams(words, k))
        if short:
            what = f"decontaminate.against: {short:,} of {texts:,} texts have fewer than {min(n, FEWEST_WORDS)} words"
            remedy = "join each with what belongs to it (a question with its answer)"
            if not grams:
                raise DataError(f"{what}: nothing is left to look for; {remedy}")
            say(f"{what} and are not looked for; {remedy}")
        file = BytesIO()
        np.savez(
            file,
            allow_pickle=False,
            **{str(k): np.unique(np.concatenate(found)) for k, found in grams.items()},
        )
        save(path, file.getvalue())
    return path


def _deduplicate(job: Job, malformed_share: float) -> tuple[Stage, ...] | None:
    """The books of all stages up to dedup, once STEM.keep.npy says what each task keeps; None where dedup is off."""
    if job.recipe.dedup == Dedup():
        return None
    books = job.work / "dedup.json"
    if books.exists():
        return tuple(Stage.model_validate(stage) for stage in json.loads(books.read_text()))
    stems = [job.work / f"sketch-{name}" for name in job.names]
    calls = [(task, stem, job.recipe) for task, stem in zip(job.tasks, stems, strict=True)]
    sketched = _finish(
        job, "sketch", sketch, calls, [stem.with_suffix(".done.json") for stem in stems], Sketched
    )
    stages = total(s.stages for s in sketched)
    _check_read(job, stages, [s.malformed for s in sketched], malformed_share)
    job.report("dedup", 0, 1)
    stages = total([stages, deduplicate(stems, sketched, job.recipe)])
    save(books, json.dumps([stage.model_dump() for stage in stages]).encode())
    job.report("dedup", 1, 1)
    return stages


def _tokenize(job: Job, held_out: Path | None, dedup: bool) -> list[Done]:
    keeps = [job.work / f"sketch-{name}.keep.npy" if dedup else None for name in job.names]
    calls = [
        (task, name, job.work, job.recipe, held_out, keep)
        for task, name, keep in zip(job.tasks, job.names, keeps, strict=True)
    ]
    return _finish(
        job,
        "tokenize",
        tokenize,
        calls,
        [job.work / f"{name}.done.json" for name in job.names],
        Done,
    )


def _finish(
    job: Job,
    what: str,
    function: Callable[..., Record],
    calls: Sequence[tuple[Any, ...]],
    records: Sequence[Path],
    kind: type[Record],
) -> list[Record]:
    """One call per task, less those whose record is there."""
    found = {
        i: kind.model_validate_json(r.read_bytes()) for i, r in enumerate(records) if r.exists()
    }
    sizes = [sum(piece.bytes for piece in task) for task in job.tasks]
    finished = sum(sizes[i] for i in found)
    missing = [i for i in range(len(calls)) if i not in found]
    job.report(what, finished, sum(sizes))

    def note(index: int, _: Record) -> None:
        nonlocal finished
        finished += sizes[missing[index]]
        job.report(what, finished, sum(sizes))

    found.update(
        zip(missing, run(function, [calls[i] for i in missing], note, job.workers), strict=True)
    )
    return [found[i] for i in range(len(calls))]


def _check_read(
    job: Job, stages: Sequence[Stage], named: Sequence[Position | None], share: float
) -> None:
    if not stages:
        shutil.rmtree(job.work)
        raise _empty(job.recipe)
    bad = stages[0].dropped.get("malformed", (0, 0))[0]
    if bad > share * stages[0].documents_in:
        path, position, reason = next(filter(None, named))
        raise DataError(
            f"malformed={bad:,} of {stages[0].documents_in:,} documents, more than malformed-share={share}; "
            f"the first is {path} at {position:,}: {reason}; mend the input or raise --malformed-share"
        )


def _set_aside(job: Job, done: Sequence[Done]) -> list[str]:
    """The file with the positions of what was malformed, for whoever wants to mend the input; if anything was."""
    parts = [
        job.work / f"{name}.malformed"
        for name, d in zip(job.names, done, strict=True)
        if d.malformed
    ]
    if parts:
        with replacing(job.work / ASIDE) as whole:
            for part in parts:
                with part.open("rb") as lines:
                    shutil.copyfileobj(lines, whole)
    return [ASIDE] if parts else []


def _manifest(
    job: Job, done: Sequence[Done], stages: Sequence[Stage], tokenizer: Tokenizer, fingerprint: str
) -> Manifest:
    if stages[-1].documents_kept == 0:
        shutil.rmtree(job.work)  # of no use to whoever mends it
        reasons = ", ".join(
            f"{n:,} {why}" for stage in stages for why, (n, _) in stage.dropped.items()
        )
        raise DataError(
            f"sources={', '.join(job.recipe.sources)}: none of {stages[0].documents_in:,} documents is left "
            f"({reasons}); check the text or loosen the filters"
        )
    written = Split.of([shard for d in done for shard in d.shards.values()])
    encoded = Stage(
        name="tokenize",
        documents_in=stages[-1].documents_kept,
        bytes_in=stages[-1].bytes_kept,
        documents_kept=written.documents,
        bytes_kept=written.bytes,
        dropped={},
        tokens=written.tokens,
    )
    return Manifest(
        version=VERSION,
        hash="",
        plan=fingerprint,
        tokenizer=tokenizer.info(MODEL),
        dtype=dtype_for(tokenizer.vocab),
        splits={
            name: Split.of([d.shards[name] for d in done if name in d.shards]) for name in SPLITS
        },
        sources=mixed([_share(name, done) for name in job.recipe.sources], job.recipe.mixture),
        stages=(*stages, encoded),
    )


def _share(source: str, done: Sequence[Done]) -> SourceShare:
    """What training can draw from the source; held-out documents are not in it."""
    split = Split.of(
        [d.shards["train"] for d in done if d.source == source and "train" in d.shards]
    )
    language = synthetic.LANGUAGES.get(source)
    return SourceShare(
        name=source,
        documents=split.documents,
        bytes=split.bytes,
        tokens=split.tokens,
        entropy_nats_per_byte=synthetic.entropy_nats_per_byte(language) if language else None,
    )
