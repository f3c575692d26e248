"""From sources to a corpus: plan, tokenizer, tasks on Ray, manifest last.

What a task has finished is recorded under .work by the fingerprint of all that decides its bytes, so that a call after
Ctrl-C, a lost worker or a power cut does only what is missing, and ends in the same bytes.
"""

import fcntl
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

import xxhash

from pipeline.data.cluster import cluster, run
from pipeline.data.files import TEMPORARY, as_data_error, replacing
from pipeline.data.piece import MB, Task
from pipeline.data.read import Malformed, read
from pipeline.data.recipe import Recipe
from pipeline.data.shards import MANIFEST, VERSION, Corpus, Manifest, SourceShare, Split, Stage, dtype_for
from pipeline.data.sources import plan
from pipeline.data.synthetic import entropy_nats_per_byte
from pipeline.data.tokenize import Done, tokenize
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import DataError

MODEL = "tokenizer.model"
RECIPE = "recipe.json"
WORK = ".work"
SAMPLE_TASKS = 64
MALFORMED_SHARE = 0.01  # of the documents; more is taken for the wrong file rather than for a few bad lines

Report = Callable[[str, int, int], None]  # what, bytes done, bytes in all


def prepare(
    recipe: Recipe,
    out: Path,
    *,
    model: bytes | None = None,
    workers: int | None = None,
    malformed_share: float = MALFORMED_SHARE,
    report: Report = lambda *_: None,
) -> tuple[Manifest, bool]:
    """Make the corpus, or finish it; returns its manifest and whether it was already there."""
    tasks = plan(recipe.sources, limit_bytes=recipe.limit_bytes, seed=recipe.seed)
    if not tasks:
        raise DataError(f"sources={', '.join(recipe.sources)}: no text in them; every file is empty")
    inputs = xxhash.xxh3_128_hexdigest(repr([[astuple(piece) for piece in task] for task in tasks]).encode())
    fingerprint = recipe.fingerprint(inputs)
    with _claimed(out, recipe, inputs):
        if (out / MANIFEST).exists():
            corpus = Corpus.open(out)
            return corpus.manifest, True
        with cluster(workers):
            tokenizer = _tokenizer(tasks, recipe, out, model, report)
            done = _tokenize(tasks, recipe, out, fingerprint, workers, report)
        _check_malformed(done, malformed_share)
        _set_aside(done, out)
        manifest = _manifest(done, recipe, tokenizer, fingerprint)
        sealed = manifest.save(out)
        shutil.rmtree(out / WORK)
        return sealed, False


@contextmanager
def _claimed(out: Path, recipe: Recipe, inputs: str) -> Iterator[None]:
    """Take the directory for these arguments alone, and for this process alone."""
    try:
        if out.is_dir() and not (out / RECIPE).exists() and any(out.iterdir()):
            raise DataError(f"out={out}: not empty and not made by `launch data prepare`; choose another directory")
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"recipe": recipe.model_dump(mode="json"), "inputs": inputs}, indent=1)
        if not (out / RECIPE).exists():
            with replacing(out / RECIPE) as file:
                file.write(text.encode())
        _same_arguments(out, json.loads((out / RECIPE).read_text()), json.loads(text))
        with (out / RECIPE).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"out={out}: another `launch data prepare` is writing there; wait for it") from None
            for left in out.rglob(f"*{TEMPORARY}"):
                left.unlink()
            try:
                yield
            except DataError:
                _leave(out)
                raise
    except OSError as error:
        raise as_data_error(error, out) from error


def _leave(out: Path) -> None:
    """Nothing finished, nothing left: the next call may come with other arguments."""
    if not (out / MANIFEST).exists() and not any(out.glob("*.idx")):
        shutil.rmtree(out / WORK, ignore_errors=True)
        for name in (MODEL, RECIPE):
            (out / name).unlink(missing_ok=True)


def _same_arguments(out: Path, before: dict[str, object], now: dict[str, object]) -> None:
    if before == now:
        return
    old, new = before.get("recipe"), now["recipe"]
    assert isinstance(new, dict)
    differing = [key for key in new if not isinstance(old, dict) or old.get(key) != new[key]]
    if not differing or not isinstance(old, dict):
        raise DataError(f"out={out}: its input files have changed since; choose another --out or remove this one")
    key = differing[0]
    raise DataError(
        f"out={out}: made with {key}={old.get(key)!r}, now {new[key]!r}; choose another --out or remove this one"
    )


def _tokenizer(tasks: Sequence[Task], recipe: Recipe, out: Path, model: bytes | None, report: Report) -> Tokenizer:
    path = out / MODEL
    if not path.exists():
        if model is None:
            report("tokenizer", 0, 1)
            [model] = run(_train, [(tasks, recipe)])
            report("tokenizer", 1, 1)
        with replacing(path) as file:
            file.write(model)
    return Tokenizer.open(path)


def _train(tasks: Sequence[Task], recipe: Recipe) -> bytes:
    return train(sample(tasks, recipe), recipe.vocab_size)


def sample(tasks: Sequence[Task], recipe: Recipe) -> Iterator[str]:
    """Documents from all over the corpus; more for a larger vocabulary, enough that rare pieces are seen often."""
    budget = min(max(8 * MB, 2500 * recipe.vocab_size), 256 * MB)
    count = min(len(tasks), SAMPLE_TASKS)
    chosen = [tasks[i * len(tasks) // count] for i in range(count)]
    for number, task in enumerate(chosen):
        left = budget // len(chosen)
        for piece in random.Random(f"{recipe.seed} {number}").sample(task, len(task)):
            for item in read(piece, recipe.text_key):
                if isinstance(item, Malformed):
                    continue
                yield item
                left -= len(item)
                if left <= 0:
                    break
            if left <= 0:
                break


def _tokenize(
    tasks: Sequence[Task], recipe: Recipe, out: Path, fingerprint: str, workers: int | None, report: Report
) -> list[Done]:
    work = out / WORK / fingerprint
    work.mkdir(parents=True, exist_ok=True)
    names = [f"{i:05d}" for i in range(len(tasks))]
    found = {i: done for i, name in enumerate(names) if (done := _recorded(work / f"{name}.json", out))}
    sizes = [sum(piece.bytes for piece in task) for task in tasks]
    finished, total = sum(sizes[i] for i in found), sum(sizes)
    missing = [i for i in range(len(tasks)) if i not in found]
    report("tokenize", finished, total)

    def note(index: int, _: Done) -> None:
        nonlocal finished
        finished += sizes[missing[index]]
        report("tokenize", finished, total)

    calls = [(tasks[i], names[i], out, work / f"{names[i]}.json", recipe) for i in missing]
    found.update(zip(missing, run(tokenize, calls, note, workers), strict=True))
    return [found[i] for i in range(len(tasks))]


def _recorded(record: Path, out: Path) -> Done | None:
    if not record.exists():
        return None
    done = Done.model_validate_json(record.read_bytes())
    there = all((out / f"{shard.name}.idx").exists() for shard in done.shards.values())  # written after .bin
    return done if there else None


def _manifest(done: Sequence[Done], recipe: Recipe, tokenizer: Tokenizer, fingerprint: str) -> Manifest:
    stage = _stage(done)
    if stage.documents_kept == 0:
        raise DataError(f"sources={', '.join(recipe.sources)}: no document with text in {stage.documents_in:,} read")
    splits = {name: Split.of([d.shards[name] for d in done if name in d.shards]) for name in ("train", "valid")}
    return Manifest(
        version=VERSION,
        hash="",
        plan=fingerprint,
        tokenizer=tokenizer.info(MODEL),
        dtype=dtype_for(tokenizer.vocab),
        splits=splits,
        sources=_shares(done, recipe),
        stages=(stage,),
    )


def _check_malformed(done: Sequence[Done], share: float) -> None:
    bad = sum(d.dropped.get("malformed", (0, 0))[0] for d in done)
    documents = sum(d.documents_in for d in done)
    if bad > share * documents:
        path, position, reason = next(m for d in done for m in d.malformed)
        raise DataError(
            f"malformed={bad:,} of {documents:,} documents, more than malformed-share={share}; "
            f"the first is {path} at {position:,}: {reason}; mend the input or raise --malformed-share"
        )


def _set_aside(done: Sequence[Done], out: Path) -> None:
    """The positions of what was malformed, for whoever wants to mend the input."""
    if lines := [json.dumps({"path": p, "position": n, "reason": r}) for d in done for p, n, r in d.malformed]:
        with replacing(out / "malformed.jsonl") as file:
            file.write("\n".join([*lines, ""]).encode())


def _stage(done: Sequence[Done]) -> Stage:
    dropped: dict[str, tuple[int, int]] = {}
    for reason, (documents, size) in (item for d in done for item in d.dropped.items()):
        before = dropped.get(reason, (0, 0))
        dropped[reason] = (before[0] + documents, before[1] + size)
    shards = [shard for d in done for shard in d.shards.values()]
    return Stage(
        name="read",
        documents_in=sum(d.documents_in for d in done),
        bytes_in=sum(d.bytes_in for d in done),
        documents_kept=sum(s.documents for s in shards),
        bytes_kept=sum(s.bytes for s in shards),
        dropped=dropped,
    )


def _shares(done: Sequence[Done], recipe: Recipe) -> tuple[SourceShare, ...]:
    shares = []
    for source in recipe.sources:
        shards = [shard for d in done if d.source == source for shard in d.shards.values()]
        entropy = entropy_nats_per_byte() if source == "synthetic" else None
        shares.append(
            SourceShare(
                name=source,
                documents=sum(s.documents for s in shards),
                bytes=sum(s.bytes for s in shards),
                tokens=sum(s.tokens for s in shards),
                entropy_nats_per_byte=entropy,
            )
        )
    return tuple(shares)
