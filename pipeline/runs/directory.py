"""The run directory: enough to resume, fit and plot a run, without any other service.

config.toml    every setting, resolved              log.jsonl      what happened, append-only
run.json       N, FLOPs, data: what fits need       checkpoints/   step-00000100/, newest last
logs/          output of each process               error.json     why the current attempt fails
faults.jsonl   why earlier attempts failed          host           where a launcher started it

It also decides, from the faults, whether another attempt is worth it.
"""

import json
import platform
import re
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock

from pipeline.atomic import digest, lock, read_regular, replace
from pipeline.config.dump import differences, to_toml
from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.errors import DataError, RunError, UserError
from pipeline.planner import count as account
from pipeline.planner.work import convention, training_flops
from pipeline.runs.history import HOST_FILE, RUN_FILE, read_record, status_of
from pipeline.runs.log import FILE, Log, Record, read

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer

# Settings that a resumed run may change: how often it logs and saves, its layout and machine, and
# where its data and its directory are.
FREE = (
    *("train.*_every", "train.keep_*", "train.max_restarts", "train.hang_s", "train.first_s"),
    *("train.*_batch", "train.recompute", "train.compile", "parallel.*", "cluster.*"),
    *("data.dir", "name", "experiment"),
)
ROWS = "examples"  # directory of the corpus of a fine-tuning run, inside the run's directory
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
# torch has an exception type only for its own device allocator, not for the CPU's or a library's.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
# A lock is released when its object is deleted. Locks of a run last as long as this process.
_HELD: list[BaseFileLock] = []


class HangError(RuntimeError):
    """A rank is alive and makes no progress."""


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def log(self) -> Path:
        return self.path / FILE

    @property
    def faults(self) -> Path:
        return self.path / "faults.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        return self.config.exists()

    def create(self, config: RunConfig, facts: dict[str, Any]) -> None:
        """Create a run. config.toml is written last: with it, the run exists."""
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            replace(self.path / RUN_FILE, json.dumps(facts, indent=1).encode() + b"\n")
            replace(self.config, to_toml(config).encode())
        except OSError as error:
            raise self._not_writable(error) from None

    def check_whole(self) -> None:
        """Refuse checkpoints without the files that describe their run."""
        lost = [file for file in (self.config, self.path / RUN_FILE) if not file.exists()]
        if lost and list_checkpoints(self.checkpoints):
            text = f"--out {self.path} has checkpoints but no {lost[0].name}; restore that file"
            raise RunError(f"{text}, or use --init {self.path} with another --out")

    def continue_with(self, config: RunConfig) -> None:
        """Save a changed config of this run; refuse it if it would make another run of it."""
        changed = differences(reload(self.config), config)
        fixed = {
            key: values
            for key, values in changed.items()
            if not any(fnmatch(key, free) for free in FREE)
        }
        if fixed:
            first = list(fixed.items())[:3]
            what = ", ".join(f"{key} was {old!r}, now {new!r}" for key, (old, new) in first)
            more = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
            text = f"--resume {self.path} cannot change the config: {what}{more}"
            raise RunError(f"{text}; use the old values or give a new --out")
        if changed:  # otherwise keep the file as it is, with its time
            replace(self.config, to_toml(config).encode())

    @property
    def finished(self) -> bool:
        return status_of(list(read(self.log)), now=0.0) == "finished"

    @property
    def world(self) -> int | None:
        """The number of processes that trained it last, or that it was created for."""
        world: int | None = self.fact("world")
        # Each start of the run logs its number of processes: a resume may use another one.
        for record in read(self.log):
            world = record.get("world", world)
        return world

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer of its data, or of an import; None if unknown."""
        imported = self.path / "tokenizer.model"
        # An imported model has no run.json, but the tokenizer file that came with it.
        known = self.fact("tokenizer")
        if known is None and imported.exists() and not (self.path / RUN_FILE).exists():
            return digest(imported)
        return None if known is None else str(known)

    def fact(self, key: str) -> Any:
        """Return a value of run.json, or None."""
        return read_record(self.path).get(key) if (self.path / RUN_FILE).exists() else None

    def lock(self, name: str = ".lock") -> BaseFileLock:
        """Lock the run for this process, until it releases the lock or dies."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = lock(self.path / name, wait_s=0.2)  # `status_of` may hold it for a moment
        except OSError as error:
            raise self._not_writable(error) from None
        if held is None:
            text = f"--out {self.path} is being written by another process"
            raise RunError(f"{text}; wait for it or give another --out")
        _HELD.append(held)
        return held

    def note_host(self, *, here: bool) -> None:
        """Record for `status_of` whether this machine trains the run, or a job does."""
        with suppress(OSError):  # a full disk is reported by what has to be written
            replace(self.path / HOST_FILE, platform.node().encode() if here else b"")

    def _not_writable(self, error: OSError) -> RunError:
        return RunError(
            f"--out {self.path} cannot be written: {error.strerror}; choose another directory"
        )

    def fail(self, error: BaseException) -> None:
        """Leave the reason for the launcher. The first process to fail is the cause: keep that."""
        fault = {
            "kind": type(error).__name__,
            "message": str(error) or repr(error),
            "user": isinstance(error, UserError),
        }
        try:
            # "x" fails if the file exists, also when two ranks fail at the same moment.
            with (self.path / "error.json").open("x", encoding="utf-8") as file:
                json.dump(fault, file)
        except OSError:
            return  # another rank was first, or the disk is full: this rank's log still has it

    def fault(self) -> dict[str, Any] | None:
        """Return the reason that `fail` left, or None."""
        try:
            fault = json.loads(read_regular(self.path / "error.json"))
        except (OSError, ValueError):
            return None
        return fault if isinstance(fault, dict) else None

    def forget_fault(self) -> None:
        (self.path / "error.json").unlink(missing_ok=True)

    def note_fault(self, code: int, detail: str = "", ranks: int | None = None) -> Record:
        """Record how the attempt that just ended failed, and clear its reason for the next one.

        If memory ran out and a smaller micro-batch is possible, the run's config gets that one.
        """
        from pipeline.planner.check import smaller_micro_batch  # the ranks need no planner

        unknown = f"it ended with code {code}: {detail or 'no reason was given'}"
        # A process that was killed leaves no reason; `detail` is what its launcher knows.
        reason = self.fault() or {"kind": "exit", "message": unknown, "user": False}
        steps = (record["step"] for record in read(self.log) if record["kind"] == "step")
        fault = {
            "time": time.time(),
            **reason,
            "step": max(steps, default=0),
            "saved": max(list_checkpoints(self.checkpoints), default=0),
        }
        if out_of_memory(fault["kind"], fault["message"]):
            lower = smaller_micro_batch(reload(self.config), ranks or self.world or 1)
            if lower is not None:
                message = fault["message"].partition("\n")[0]
                lowered = f"train.micro_batch is lowered to {lower.train.micro_batch}"
                fault |= {"lowered": True, "message": f"{message}; {lowered}"}
                self.continue_with(lower)
        with closing(Log(self.faults)) as log:
            log.append(fault)
        self.forget_fault()
        return fault

    def past_faults(self) -> list[Record]:
        return list(read(self.faults, log=False))


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, oldest first; unfinished ones have other names."""
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError):  # or it is being deleted
        for path in root.iterdir():
            name = _CHECKPOINT_NAME.fullmatch(path.name)
            if name and path.is_dir():
                found[int(name[1])] = path
    return dict(sorted(found.items()))


def tokenizer_of(
    run: Path, data: str | None, given: Path | None = None, *, vocab: int | None = None
) -> "Tokenizer":
    """Return the given tokenizer, the one beside the run or the one of its data, if it fits.

    `vocab` is that of the model that will read its ids."""
    # Importing the tokenizer takes a second that other users of this module need not wait.
    from pipeline.data.corpus import Corpus
    from pipeline.data.tokenizer import Tokenizer

    beside = run_of(run) / "tokenizer.model"
    if given is not None or beside.is_file():
        found = Tokenizer.open(given or beside)
    elif data is not None and Path(data).is_dir():
        found = Corpus.open(Path(data)).tokenizer
    else:
        # Only an imported model has no data.
        reason = f"data.dir={data} does not exist" if data else f"{beside} does not exist"
        raise DataError(f"{run}: {reason}, so its tokenizer is missing; give --tokenizer FILE")
    remedy = "give --tokenizer, the .model of its data"
    same_tokenizer(run, found.fingerprint, found.name, remedy)
    if vocab is not None and found.vocab > vocab:
        raise DataError(f"{found.name} has {found.vocab:,} pieces, but {run} {vocab:,}; {remedy}")
    return found


def run_of(path: Path) -> Path:
    """RUN, RUN/checkpoints and RUN/checkpoints/step-00000100 all belong to RUN."""
    folder = path.absolute()
    for place in (folder, folder.parent):
        if place.name == "checkpoints":
            return place.parent
    return path


def same_tokenizer(run: Path, found: str, what: str, remedy: str) -> None:
    """Refuse a tokenizer other than that of the run, or of the run that a checkpoint belongs to."""
    known = RunDir(run_of(run)).tokenizer
    if known not in (None, found):
        raise DataError(f"{what}: its tokenizer is {found}, but that of {run} is {known}; {remedy}")


def facts(
    config: RunConfig, *, tokenizer: str, bytes_per_token: float, peak_flops: float | None
) -> dict[str, Any]:
    """Return run.json: what fits and pages need, so that they do not have to recompute it."""
    count = account.params(config.model)
    flops_per_token = training_flops(config).model
    tokens = config.train.steps * config.train.batch_tokens
    # A law never mixes distilled runs with others.
    objective = config.objective.name + ("" if config.distill is None else " distilled")
    return {
        "version": 1,
        "name": config.name,
        "experiment": config.experiment,
        "size": config.model.size,
        "arch": config.model.arch,
        # Older runs do not name theirs, which was causal.
        **({} if objective == "causal" else {"objective": objective}),
        "params": {**asdict(count), "total": count.total, "non_embedding": count.non_embedding},
        "flops_per_token": flops_per_token,
        "convention": convention(config),
        "vocab": config.model.vocab,
        "tokenizer": tokenizer,
        "data": config.data.hash,
        "bytes_per_token": bytes_per_token,
        "batch_tokens": config.train.batch_tokens,
        "steps": config.train.steps,
        "tokens": tokens,
        "flops": tokens * flops_per_token,
        "seq": config.model.seq,
        "peak_flops": peak_flops,
    }


def no_restart(faults: Sequence[Record], max_restarts: int) -> str | None:
    """Return why the run should not be restarted, or None. A new checkpoint resets the count."""
    last = faults[-1]
    if last.get("lowered"):
        return None  # the next attempt is not like this one
    if last["user"]:  # only a person can fix it
        return str(last["message"])
    # The same fault at the same step again: another attempt would end there as well.
    same_place = [(fault["kind"], fault["step"]) for fault in faults[-2:]]
    if max_restarts and len(same_place) == 2 and same_place[0] == same_place[1]:
        return f"failed twice at step {last['step']}: {fault_line(last)}"
    attempts = sum(fault["saved"] == last["saved"] for fault in faults)
    if attempts > max_restarts:
        times = f"{attempts} times " if max_restarts else ""
        return f"failed {times}after step {last['saved']} was saved: {fault_line(last)}"
    return None


def out_of_memory(kind: str, message: str) -> bool:
    return kind == "OutOfMemoryError" or any(words in message for words in _OUT_OF_MEMORY)


def fault_line(fault: Record) -> str:
    message = str(fault["message"]).strip().partition("\n")[0]
    return f"{fault['kind']}: {message[:300]}"
