"""The run directory: enough to resume, to fit and to draw, with no other service.

config.toml    every setting, resolved          log.jsonl      what happened, append-only
run.json       N, FLOPs, data: what fits need   checkpoints/   step-00000100/, newest last
logs/          what each process wrote          error.json     why this attempt fails; then faults.jsonl
"""

import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.atomic import digest, replace
from pipeline.config.dump import differences, to_toml
from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.errors import DataError, RunError, UserError
from pipeline.planner import count as account
from pipeline.runs.log import Record, read

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer

# what a resumed run may change: how often it speaks and saves, its layout and machine, where its data and itself lie
FREE = (
    *(
        f"train.{key}"
        for key in (
            "*_every",
            "keep_*",
            "max_restarts",
            "hang_s",
            "first_s",
            "*_batch",
            "recompute",
            "compile",
        )
    ),
    *("parallel.*", "cluster.*", "data.dir", "name", "experiment"),
)


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

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
        """A new run; config.toml is written last and makes it exist."""
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            replace(self.path / "run.json", json.dumps(facts, indent=1).encode() + b"\n")
            replace(self.config, to_toml(config).encode())
        except OSError as error:
            raise RunError(
                f"--out {self.path} cannot be written: {error.strerror}; choose another directory"
            ) from None

    def continue_with(self, config: RunConfig) -> None:
        """A resumed run is the same run; only what is free to change is taken over."""
        changed = differences(reload(self.config), config)
        fixed = {
            key: values
            for key, values in changed.items()
            if not any(fnmatch(key, free) for free in FREE)
        }
        if fixed:
            what = ", ".join(f"{k} was {a!r}, now {b!r}" for k, (a, b) in list(fixed.items())[:3])
            more = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
            raise RunError(
                f"--resume {self.path} with another config: {what}{more}; take that back or give a new --out"
            )
        if changed:
            replace(self.config, to_toml(config).encode())

    @property
    def last_event(self) -> Record:
        """The last thing that happened, or an empty record."""
        events = [r for r in read(self.log) if r.get("kind") == "event"]
        return events[-1] if events else {}

    @property
    def finished(self) -> bool:
        return self.last_event.get("event") == "finish"

    @property
    def world(self) -> int | None:
        """How many processes trained it last, or were to."""
        begun = self.path / "run.json"
        worlds = [json.loads(begun.read_bytes()).get("world")] if begun.exists() else [None]
        return [*worlds, *(int(record["world"]) for record in read(self.log) if "world" in record)][
            -1
        ]

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer it was trained with, or that came with an import; None where nobody knows."""
        begun, imported = self.path / "run.json", self.path / "tokenizer.model"
        if begun.exists():
            known: str | None = json.loads(begun.read_bytes()).get("tokenizer")
            return known
        return digest(imported) if imported.exists() else None

    def claim(self) -> int:
        """Hold the directory for this launcher, before anything is in it: of two first launches one is refused."""
        return self.lock(".launch")

    def lock(self, name: str = ".lock") -> int:
        """Hold the run for this process; the kernel lets go when it dies, however it dies."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / name, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise RunError(
                f"--out {self.path} cannot be written: {error.strerror}; choose another directory"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise RunError(
                f"run {self.path} is being written by another process; wait for it or give another --out"
            ) from None
        return handle

    def fail(self, error: BaseException) -> None:
        """Leave the reason for the launcher; the first process to fail is the cause, so it alone is kept."""
        fault = {
            "kind": type(error).__name__,
            "message": str(error) or repr(error),
            "user": isinstance(error, UserError),
        }
        try:
            with (self.path / "error.json").open("x", encoding="utf-8") as file:
                json.dump(fault, file)
        except OSError:
            return  # another rank was first, or the disk is full: the log of this rank still has it

    def fault(self) -> dict[str, Any] | None:
        try:
            fault: dict[str, Any] = json.loads(
                (self.path / "error.json").read_text(encoding="utf-8")
            )
            return fault
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def forget_fault(self) -> None:
        (self.path / "error.json").unlink(missing_ok=True)


def tokenizer_of(run: Path, data: str | None, given: Path | None = None) -> "Tokenizer":
    """The one that is given, the one beside the run, or that of its data: the run's own."""
    from pipeline.data.shards import Corpus  # a second that others need not wait
    from pipeline.data.tokenizer import Tokenizer

    beside = run / "tokenizer.model"
    if given is not None or beside.is_file():
        found = Tokenizer.open(given or beside)
    elif data is not None and Path(data).is_dir():
        found = Tokenizer.open(Path(data) / Corpus.open(Path(data)).manifest.tokenizer.file)
    else:
        raise DataError(
            f"{run}: its data.dir={data} is not here, and with it the tokenizer; give --tokenizer FILE"
        )
    same_tokenizer(
        run, found.fingerprint, found.name, "give --tokenizer, the .model that the run's data has"
    )
    return found


def same_tokenizer(run: Path, found: str, what: str, remedy: str) -> None:
    """Of a run directory, or one checkpoint of it: to other pieces its numbers mean nothing."""
    inner = next(
        (p for p in (run.absolute(), run.absolute().parent) if p.name == "checkpoints"), None
    )
    known = RunDir(inner.parent if inner else run).tokenizer
    if known not in (None, found):
        raise DataError(f"{what}: its tokenizer is {found}, but that of {run} is {known}; {remedy}")


def facts(
    config: RunConfig, *, tokenizer: str, bytes_per_token: float, peak_flops: float | None
) -> dict[str, Any]:
    """What fits and pages need to know of a run, without importing or recomputing anything."""
    count = account.params(config.model)
    assert config.train.steps is not None and config.train.batch_tokens != "auto", (
        "resolve the recipe first"
    )
    tokens = config.train.steps * config.train.batch_tokens
    return {
        "version": 1,
        "name": config.name,
        "experiment": config.experiment,
        "size": config.model.size,
        "arch": config.model.arch,
        "params": {**asdict(count), "total": count.total, "non_embedding": count.non_embedding},
        "flops_per_token": account.flops_per_token(config.model).model,
        "convention": account.CONVENTION,
        "vocab": config.model.vocab,
        "tokenizer": tokenizer,
        "data": config.data.hash,
        "bytes_per_token": bytes_per_token,
        "batch_tokens": config.train.batch_tokens,
        "steps": config.train.steps,
        "tokens": tokens,
        "flops": tokens * account.flops_per_token(config.model).model,
        "seq": config.model.seq,
        "peak_flops": peak_flops,
    }


_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> dict[int, Path]:
    """By step, oldest first. What is still being written has another name, and so has what a person put aside."""
    found = {
        int(name[1]): p
        for p in root.glob("step-*")
        if (name := _CHECKPOINT_NAME.fullmatch(p.name)) and p.is_dir()
    }
    return dict(sorted(found.items()))
