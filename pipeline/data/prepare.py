"""From sources to a corpus: plan, tokenizer, passes over the text on Ray, manifest last.

Everything is written to .work/FINGERPRINT first; the fingerprint covers everything that determines
the bytes. After Ctrl-C, a lost worker or a power cut, the next call does only what is missing, and
the result has the same bytes.
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import astuple, dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from pipeline.config.parts import Frozen
from pipeline.data import shards, synthetic
from pipeline.data.clean import normalize, total
from pipeline.data.corpus import WORK, Corpus, claimed, is_finished, publish
from pipeline.data.corpus_recipe import Dedup, Malformed, Recipe, Task
from pipeline.data.dedup import deduplicate
from pipeline.data.encode import CONVERTED, HELD_OUT, MODEL, SPLITS, Encoded, tokenize
from pipeline.data.order import check_mixture, mixed
from pipeline.data.ray_pool import check_workers, cluster, run
from pipeline.data.readers import read, tokens_not_text
from pipeline.data.sketch import Sketched, ngrams, sketch, word_hashes
from pipeline.data.sources import Warn, plan
from pipeline.data.tokenizer import Tokenizer, check_vocab_size, train_on
from pipeline.errors import DataError
from pipeline.objective.draws import U64

MALFORMED = "malformed.jsonl"
MALFORMED_SHARE = 0.01  # of the documents; more looks like a wrong file, not like a few bad lines
# A shorter held-out text occurs in many documents by chance (GPT-3's appendix C).
SHORTEST_HELD_OUT_WORDS = 8

Report = Callable[[str, int, int], None]  # name of the stage, bytes done, bytes in total
Record = TypeVar("Record", bound=Frozen)


@dataclass(frozen=True)
class Job:
    """What every step of one preparation needs."""

    recipe: Recipe
    tasks: Sequence[Task]
    work: Path  # every file is written here first
    workers: int | None  # None: all CPUs of the cluster
    malformed_share: float
    report: Report

    def stems(self, prefix: str = "") -> list[Path]:
        """Name the files that a pass writes, by task."""
        return [self.work / f"{prefix}{number:05d}" for number in range(len(self.tasks))]


def prepare(
    recipe: Recipe,
    out: Path,
    *,
    model: bytes | None = None,
    workers: int | None = None,
    malformed_share: float = MALFORMED_SHARE,
    report: Report = lambda *_: None,
    warn: Warn = lambda line: None,
) -> tuple[shards.Manifest, bool]:
    """Make the corpus, or finish it. Return its manifest and whether it was already complete."""
    if model is None:
        check_vocab_size(recipe.vocab_size, recipe.train.controls)
    check_mixture(recipe.mixture, recipe.sources)
    limit_bytes = recipe.limit_bytes
    tasks = plan(recipe.sources, limit_bytes=limit_bytes, seed=recipe.seed, out=out, warn=warn)
    if not tasks:
        raise _no_text(recipe)
    for piece in chain.from_iterable(tasks):
        if recipe.pairs and piece.kind not in ("jsonl", "parquet", "arrow", "hf"):
            known = ".jsonl, .parquet, .arrow or hf:NAME"
            given = f"pairs={','.join(recipe.pairs)}"
            raise DataError(f"source={piece.source!r} has no columns for {given}; give {known}")
        if piece.kind == "megatron" and not recipe.is_plain:
            raise tokens_not_text(piece)
    against = _held_out_tasks(recipe, out, warn)
    pieces = [[astuple(piece) for piece in task] for task in [*tasks, *against]]
    inputs = xxhash.xxh3_128_hexdigest(repr(pieces).encode())
    fingerprint = recipe.fingerprint(inputs)  # of everything that determines the bytes
    arguments = {"recipe": recipe.model_dump(mode="json"), "inputs": inputs}
    if is_finished(out, arguments):
        report("verify", 0, 1)
        manifest = Corpus.open(out, verify=True).manifest
        report("verify", 1, 1)
        # A call that was killed just after it wrote the manifest leaves .work.
        shutil.rmtree(out / WORK, ignore_errors=True)
        return manifest, True
    check_workers(workers)
    with claimed(out, fingerprint, warn) as work:
        job = Job(recipe, tasks, work, workers, malformed_share, report)
        # Ray prints that it has lost a worker or a node; stdout is for the result of the command.
        with redirect_stdout(sys.stderr), cluster(workers):
            tokenizer = _make_tokenizer(job, model)
            _write_held_out_ngrams(job, against, warn)
            counted = _deduplicate(job)
            encoded = _run_pass(job, "tokenize", tokenize, job.stems(), Encoded)
        stages = total([counted or (), *(record.stages for record in encoded)])
        _check_read(job, stages, encoded)
        manifest = _manifest(job, encoded, stages, tokenizer, fingerprint)
        written = [shard for record in encoded for shard in record.shards.values()]
        files = [f"{shard.name}.{suffix}" for shard in written for suffix in ("bin", "idx")]
        # The manifest comes last: a directory without one is not a corpus.
        publish(work, out, [*files, *_join_malformed(job, encoded), MODEL], arguments)
        sealed = manifest.save(out)
        shutil.rmtree(out / WORK, ignore_errors=True)
        return sealed, False


# The passes


def _make_tokenizer(job: Job, model: bytes | None) -> Tokenizer:
    path = job.work / MODEL
    if not path.exists():
        if model is None:
            job.report("tokenizer", 0, 1)
            [model] = run(train_on, [(list(job.tasks), job.recipe)])
            job.report("tokenizer", 1, 1)
        shards.save(path, model)
    tokenizer = Tokenizer.open(path)
    if tokenizer.fast:  # convert it once, not in every worker
        shards.save(job.work / CONVERTED, tokenizer.converted.encode())
    return tokenizer


def _held_out_tasks(recipe: Recipe, out: Path, warn: Warn) -> list[Task]:
    # Errors and warnings of `plan` name the key `source`, but the user wrote another one.
    def rename(line: str) -> str:
        return line.replace("source=", "decontaminate.against=", 1)

    if recipe.decontaminate is None:
        return []
    against = recipe.decontaminate.against
    try:
        return plan(against, limit_bytes=None, seed=0, out=out, warn=lambda s: warn(rename(s)))
    except DataError as error:
        raise DataError(rename(str(error))) from error


def _write_held_out_ngrams(job: Job, against: Sequence[Task], warn: Warn) -> None:
    """Write all n-grams of the held-out texts, by n, sorted; a shorter text is one n-gram."""
    path = job.work / HELD_OUT
    if job.recipe.decontaminate is None or path.exists():
        return
    n = job.recipe.decontaminate.ngram
    shortest = min(n, SHORTEST_HELD_OUT_WORDS)
    grams: dict[int, list[U64]] = {}
    texts = 0
    short = 0
    for piece in chain.from_iterable(against):
        for text in read(piece, (job.recipe.text_key,)):
            if isinstance(text, Malformed):  # a skipped text might be in the training data
                raise DataError(f"decontaminate.against: {text.where}; fix the file")
            words = word_hashes(normalize(text, job.recipe.normalise).encode())
            texts += 1
            length = min(n, len(words))
            if length < shortest:
                short += 1
            else:
                grams.setdefault(length, []).append(ngrams(words, length))
    if short:
        problem = (
            f"decontaminate.against: {short:,} of {texts:,} texts have fewer than {shortest} words "
            "and are ignored; join each with its context (a question with its answer)"
        )
        if not grams:
            raise DataError(problem)
        warn(problem)
    arrays = {str(length): np.unique(np.concatenate(found)) for length, found in grams.items()}
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    shards.save(path, file.getvalue())


def _deduplicate(job: Job) -> tuple[shards.Stage, ...] | None:
    """Write which documents each task keeps. Return the counts up to dedup; None if it is off."""
    if job.recipe.dedup == Dedup():
        return None
    counts = job.work / "dedup.json"
    if counts.exists():
        return tuple(shards.Stage.model_validate(stage) for stage in json.loads(counts.read_text()))
    stems = job.stems("sketch-")
    sketched = _run_pass(job, "sketch", sketch, stems, Sketched)
    stages = total(s.stages for s in sketched)
    _check_read(job, stages, sketched)
    job.report("dedup", 0, 1)
    stages = total([stages, deduplicate(stems, sketched, job.recipe)])
    shards.save(counts, json.dumps([stage.model_dump() for stage in stages]).encode())
    job.report("dedup", 1, 1)
    return stages


def _run_pass(
    job: Job,
    what: str,
    function: Callable[[Task, Path, Recipe], Record],
    stems: Sequence[Path],
    kind: type[Record],
) -> list[Record]:
    """Call the function for each task, except those whose record exists."""
    records = [stem.with_suffix(".done.json") for stem in stems]
    found = {
        i: kind.model_validate_json(record.read_bytes())
        for i, record in enumerate(records)
        if record.exists()
    }
    sizes = [sum(piece.bytes for piece in task) for task in job.tasks]
    done = sum(sizes[i] for i in found)
    missing = [i for i in range(len(stems)) if i not in found]
    job.report(what, done, sum(sizes))

    # Progress in bytes: tasks differ in size.
    def on_done(index: int, _: Record) -> None:
        nonlocal done
        done += sizes[missing[index]]
        job.report(what, done, sum(sizes))

    calls = [(job.tasks[i], stems[i], job.recipe) for i in missing]
    found.update(zip(missing, run(function, calls, on_done, job.workers), strict=True))
    return [found[i] for i in range(len(stems))]


# The result


def _no_text(recipe: Recipe) -> DataError:
    return DataError(f"sources={', '.join(recipe.sources)}: every file is empty; add text")


def _check_read(
    job: Job, stages: Sequence[shards.Stage], records: Sequence[Encoded | Sketched]
) -> None:
    if not stages:
        shutil.rmtree(job.work)  # no task has read a document
        raise _no_text(job.recipe)
    bad = stages[0].dropped.get("malformed", (0, 0))[0]
    if bad > job.malformed_share * stages[0].documents_in:
        first = next(record.malformed for record in records if record.malformed)
        raise DataError(
            f"malformed={bad:,} of {stages[0].documents_in:,} documents, more than "
            f"malformed-share={job.malformed_share}; the first is {first.where}; "
            "fix the input or raise --malformed-share"
        )


def _join_malformed(job: Job, encoded: Sequence[Encoded]) -> list[str]:
    """Join the tasks' lists of malformed documents into one file, if there are any."""
    records = zip(job.stems(), encoded, strict=True)
    parts = [stem.with_suffix(".malformed") for stem, record in records if record.malformed]
    if not parts:
        return []
    with shards.replacing(job.work / MALFORMED) as whole:
        for part in parts:
            with part.open("rb") as lines:
                shutil.copyfileobj(lines, whole)
    return [MALFORMED]


def _manifest(
    job: Job,
    encoded: Sequence[Encoded],
    stages: Sequence[shards.Stage],
    tokenizer: Tokenizer,
    fingerprint: str,
) -> shards.Manifest:
    if stages[-1].documents_kept == 0:
        shutil.rmtree(job.work)  # useless once the input or the recipe is fixed
        dropped = (item for stage in stages for item in stage.dropped.items())
        reasons = ", ".join(f"{reason}: {count:,}" for reason, (count, _) in dropped)
        raise DataError(
            f"sources={', '.join(job.recipe.sources)}: none of {stages[0].documents_in:,} "
            f"documents is left ({reasons}); check the text or loosen the filters"
        )
    written = shards.Split.of([shard for record in encoded for shard in record.shards.values()])
    tokenize_stage = shards.Stage(
        name="tokenize",
        documents_in=stages[-1].documents_kept,
        bytes_in=stages[-1].bytes_kept,
        documents_kept=written.documents,
        bytes_kept=written.bytes,
        dropped={},
        tokens=written.tokens,
    )
    splits = {}
    for name in SPLITS:
        splits[name] = shards.Split.of([r.shards[name] for r in encoded if name in r.shards])
    shares = [_source_share(name, splits["train"]) for name in job.recipe.sources]
    return shards.Manifest(
        version=shards.VERSION,
        hash="",
        plan=fingerprint,
        tokenizer=tokenizer.info(MODEL),
        dtype=shards.dtype_for(tokenizer.vocab),
        splits=splits,
        sources=mixed(shares, job.recipe.mixture),
        stages=(*stages, tokenize_stage),
        pairs=job.recipe.pairs or (),
    )


def _source_share(source: str, train: shards.Split) -> shards.SourceShare:
    """Count the training documents of a source."""
    split = shards.Split.of([shard for shard in train.shards if shard.source == source])
    language = synthetic.LANGUAGES.get(source)
    return shards.SourceShare(
        name=source,
        documents=split.documents,
        bytes=split.bytes,
        tokens=split.tokens,
        entropy_nats_per_byte=synthetic.entropy_nats_per_byte(language) if language else None,
    )
