"""Before the first process starts: settle the config of a run and refuse what cannot work, in one line."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from pipeline.config.dump import changed
from pipeline.config.layers import load, reload
from pipeline.config.schema import Cluster, RunConfig
from pipeline.data.corpus import Corpus
from pipeline.errors import ConfigError, RunError
from pipeline.planner.check import DeviceMemory, Resized, check_one_micro_batch, fit_to_devices
from pipeline.planner.memory import Layout, checkpoint_bytes, disk_bytes, offloaded
from pipeline.runs.directory import RunDir, facts, list_checkpoints, same_tokenizer
from pipeline.train.branch import begin, meeting

_OF_THE_WEIGHTS = (
    "tied",
    "parametrization",
    "scaled_embedding",
)  # what they were drawn and trained as
_VERIFY_BYTES = 4 * 2**30  # a second or two from a warm disk
_FP8 = "train.fp8=true without model.scaled_embedding=true: a wide model may stay 2% above bf16 (docs/TRAINING.md)"


@dataclass(frozen=True, slots=True)
class Devices:
    """What a node trains on."""

    gpus: int
    memory_bytes: (
        int | None
    )  # of one GPU, or of the host when there is none; None: unknown from here
    name: str
    host_bytes: int | None = None  # beside GPUs; None: unknown from here

    @classmethod
    def here(cls) -> "Devices":
        host = psutil.virtual_memory().available
        if any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
            import torch  # seconds that a node with no GPU driver need not wait

            if torch.cuda.is_available():
                properties = torch.cuda.get_device_properties(0)
                return cls(
                    torch.cuda.device_count(), properties.total_memory, properties.name, host
                )
        return cls(0, host, "CPU")

    @classmethod
    def of(cls, cluster: Cluster, gpus: int) -> "Devices":
        """Of a cluster's node, seen from its login node."""
        return cls(gpus, cluster.memory_bytes if gpus else None, cluster.device or "GPU")


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; None leaves it to the config."""

    size: str | None
    arch: str
    data: Path | None
    out: Path | None
    nproc: int
    cluster: str | None = None
    file: Path | None = None
    sets: Sequence[str] = ()
    over: dict[str, Any] | None = None
    resume: bool = False
    fresh: bool = False  # without an `out`: a directory of its own, beside those there are
    fewest: int | None = None  # processes, of a job that may start with fewer than nproc
    branch: Path | None = None  # a run whose plateau this one begins in
    init: Path | None = None  # a run whose model and weights this one begins with


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that can work, not yet written."""

    run: RunDir
    config: RunConfig
    facts: dict[str, Any] | None  # None: the run exists
    fresh: bool = False
    note: str = ""  # for the user: how train.auto_batch chose, what a setting lacks

    def commit(self) -> "PlannedRun":
        """Hold the run directory for this launcher, and create it or find it fit to continue."""
        settled = self
        while not settled._taken_over():
            settled = self._beside()
        return settled

    def _taken_over(self) -> bool:
        """False: it is another's, and the next one will do."""
        try:
            self.run.claim()
            if self.facts is not None and self.run.exists:
                raise _taken(self.run)
        except RunError:
            if self.fresh and self.run.path.exists():
                return False
            raise
        if self.facts is None:
            self.run.continue_with(self.config)
        else:
            if branch := self.facts.get("branch"):
                begin(self.run, RunDir(Path(branch["of"])), branch["step"])
            self.run.create(self.config, {**self.facts, "name": self.config.name})
        return True

    def _beside(self) -> "PlannedRun":
        """The same run in the next directory that is not there: 1b, 1b-2, 1b-3 …"""
        parent, stem, number = self.run.path.parent, self.config.name[:58], 2
        while (parent / f"{stem}-{number}").exists():
            number += 1
        name = f"{stem}-{number}"
        return replace(
            self, run=RunDir(parent / name), config=self.config.model_copy(update={"name": name})
        )


def plan_run(request: Request, devices: Devices) -> PlannedRun:
    """Everything that can be refused is refused here, before anything is written."""
    if request.size is not None and request.init is not None:
        raise ConfigError(
            f"--size {request.size} and --init {request.init} both give a model; take one of them away"
        )
    if request.size is None and request.init is None:
        return _again(request, devices)
    if request.data is None:
        raise ConfigError(
            "--data is missing; make shards with `launch data prepare --source python --out data/python`"
        )
    corpus = _corpus(request.data)
    config = _config(request, corpus)
    run = RunDir(request.out or Path("runs") / config.experiment / config.name)
    before = reload(run.config) if run.exists and request.resume else None
    other = (
        None
        if before or request.init
        else lambda size: _config(replace(request, size=size), corpus)
    )
    config, note = _fit(config, before, request, devices, other)
    drawn, model = not (before or request.init or request.branch), config.model
    if (
        config.train.fp8
        and drawn
        and not model.tied
        and model.embedding_scale * model.multipliers.embedding == 1
    ):
        note = f"{note}\n{_FP8}".lstrip()
    fresh = request.fresh and request.out is None
    if run.exists and not fresh:
        if not request.resume:
            raise _taken(run)
        _check_disk(config, run.path, request.nproc)
        return PlannedRun(run, config, None, note=note)
    _check_disk(config, run.path, request.nproc)
    train = corpus.manifest.splits["train"]
    about = facts(
        config,
        tokenizer=corpus.manifest.tokenizer.fingerprint,
        bytes_per_token=train.bytes / train.tokens,
        peak_flops=config.cluster.peak_flops if config.cluster.has(devices.name) else None,
    ) | {"world": request.nproc}
    if request.branch is not None and not run.exists:
        about["branch"] = {
            "of": str(request.branch),
            "step": meeting(config, RunDir(request.branch)),
        }
    return PlannedRun(run, config, about, fresh, note)


def _taken(run: RunDir) -> RunError:
    return RunError(
        f"--out {run.path} holds a run already; add --resume to continue it or give another --out"
    )


def _again(request: Request, devices: Devices) -> PlannedRun:
    """A run as its directory has it; what is set besides must be what a resumed run may change."""
    if not request.resume:
        raise ConfigError("--size is missing; `launch show --sizes` lists the ladder")
    if request.out is None or not RunDir(request.out).exists:
        raise RunError(
            f"--resume without --size needs the --out of an existing run, got {request.out}"
        )
    run = RunDir(request.out)
    moved = {} if request.data is None else {"data": {"dir": str(request.data)}}
    config = reload(
        run.config,
        [moved],
        cluster=request.cluster,
        file=request.file,
        sets=request.sets,
        over=request.over,
    )
    config, note = _fit(config, reload(run.config), request, devices)
    if not run.finished:
        _check_disk(config, run.path, request.nproc)
    if not run.finished or request.data is not None:
        same_data(config, _corpus(Path(config.data.dir or ".")))
    return PlannedRun(run, config, None, note=note)


def same_data(config: RunConfig, corpus: Corpus) -> None:
    if config.data.hash != corpus.manifest.hash:
        raise RunError(
            f"data.dir={config.data.dir} holds other data ({corpus.manifest.hash}) than the run began on "
            f"({config.data.hash}); restore it or start anew with another --out"
        )


def _corpus(path: Path) -> Corpus:
    """Opened with its checksums held, unless reading it all would take minutes: `launch data inspect` does it then."""
    corpus = Corpus.open(path)
    size = sum(file.stat().st_size for file in path.rglob("*.bin"))
    return Corpus.open(path, verify=True) if size < _VERIFY_BYTES else corpus


def _config(request: Request, corpus: Corpus) -> RunConfig:
    assert request.data is not None
    name = request.out or request.init
    layer: dict[str, Any] = {
        "name": re.sub(r"[^\w.-]", "-", name.resolve().name)[:64] if name else request.size,
        "data": {"dir": str(request.data), "hash": corpus.manifest.hash},
    }
    model = None
    if request.init is None:
        layer["model"] = {"vocab": corpus.padded_vocab}
    else:
        # Imports torch, which takes seconds that other requests need not wait.
        from pipeline.checkpoint.format import CONFIG
        from pipeline.checkpoint.restore import newest

        remedy = "prepare the data with --tokenizer, the .model of that run"
        same_tokenizer(
            request.init, corpus.manifest.tokenizer.fingerprint, f"--data {request.data}", remedy
        )
        began = newest(request.init).path
        model, layer["init"] = (
            reload(began / CONFIG).model.model_dump(exclude_none=True),
            str(began.resolve()),
        )
    config = load(
        size=request.size,
        arch=request.arch,
        model=model,
        data=layer,
        cluster=request.cluster,
        file=request.file,
        sets=request.sets,
        over=request.over,
    )
    corpus.check(config.model.vocab, config.model.seq, "train", "valid")
    if model is not None:
        for key in _OF_THE_WEIGHTS:
            asked, was = json.dumps(getattr(config.model, key)), json.dumps(model[key])
            if asked != was:
                of = f"the weights of --init {request.init} are of {was}"
                raise ConfigError(f"model.{key}={asked}: {of}; leave it out")
    return config


def _fit(
    config: RunConfig,
    before: RunConfig | None,
    request: Request,
    devices: Devices,
    resized: Resized | None = None,
) -> tuple[RunConfig, str]:
    """Every number settled for this world. A run that goes on keeps its global batch; how it is cut may change."""
    if before is None:
        check_one_micro_batch(config)
    else:
        train, was = config.train, before.train
        assert was.batch_tokens != "auto" and was.micro_batch != "auto"
        check_one_micro_batch(config, was.micro_batch)
        batch = was.batch_tokens if train.batch_tokens == "auto" else train.batch_tokens
        micro = "auto" if train.micro_batch == was.micro_batch else train.micro_batch
        config = changed(config, {"train.batch_tokens": batch, "train.micro_batch": micro})
        cuts = config.rows * config.parallel.sp % (request.nproc * was.micro_batch) == 0
        if micro == "auto" and cuts and (was.auto_batch or not train.auto_batch):  # as before
            config = changed(config, {"train.micro_batch": was.micro_batch})
    room = DeviceMemory(devices.memory_bytes, devices.name, not devices.gpus)
    config, note = fit_to_devices(
        config, request.nproc, room, keep=before is not None, resized=resized
    )
    if request.fewest:
        fit_to_devices(config, request.fewest, room)
    else:  # of a job's nodes nothing is seen from here
        _check_offload(config, request.nproc, devices.host_bytes)
    return config, note


def _check_offload(config: RunConfig, ranks: int, host_bytes: int | None) -> None:
    """DeviceMemory for what does not lie on the devices, and for the copy that a checkpoint is written from."""
    away, layout, copy = (
        config.parallel.offload,
        Layout.of(config, ranks),
        checkpoint_bytes(config.model),
    )
    if away.path is not None and away.nvme:
        key, folder, need = (
            f"parallel.offload.path={away.path}",
            Path(away.path),
            offloaded(config, layout, "nvme"),
        )
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"{key} is not a directory that can be written; give one on a local disk"
            )
        if need + copy > (free := shutil.disk_usage(folder).free):
            raise RunError(
                f"{key} has {_size(free)} free, the run needs {_size(need + copy)} there; give another disk"
            )
        copy = 0
    if (
        host_bytes is not None
        and (held := offloaded(config, layout, "cpu"))
        and held + copy > host_bytes
    ):
        raise ConfigError(
            f"parallel.offload to the CPU needs about {_size(held + copy)} there and {_size(host_bytes)} are free; "
            "offload to nvme (docs/TRAINING.md), or take a smaller --size"
        )


def _check_disk(config: RunConfig, path: Path, ranks: int) -> None:
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    # one more than is kept: the next is whole before the oldest goes. A run that goes on has some already
    more = max(1, config.train.keep_last + 1 - len(list_checkpoints(RunDir(path).checkpoints)))
    each, free = (
        disk_bytes(config.model, ranks=ranks, zero=config.parallel.zero),
        shutil.disk_usage(there).free,
    )
    need = more * each
    if need > free:
        raise RunError(
            f"--out {path}: {more} checkpoint{'s' if more > 1 else ''} need{'' if more > 1 else 's'} {_size(need)} and "
            f"{_size(free)} are free; make room, choose another disk, or --set train.keep_last=1"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
