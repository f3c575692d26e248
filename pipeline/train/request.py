"""Plan a run before the first process starts, and refuse impossible requests in one line."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil

from pipeline.config.dump import changed
from pipeline.config.layers import load, merge, refuse_idle, reload
from pipeline.config.objective import Pairs
from pipeline.config.parts import Learned
from pipeline.config.schema import Cluster, RunConfig, RunSpec
from pipeline.config.shape import Model
from pipeline.config.spans import Denoise
from pipeline.data.corpus import Corpus
from pipeline.data.pairs import check_pairs
from pipeline.errors import ConfigError, DataError, RunError
from pipeline.planner.check import Resized, check_one_micro_batch, fit_to_devices
from pipeline.planner.memory import DeviceMemory
from pipeline.runs.directory import RunDir, facts, same_tokenizer
from pipeline.tasks.questions import read_tasks
from pipeline.train.branch import branch_step, copy_trunk
from pipeline.train.space import check_disk, check_offload, check_path

# Settings with which the weights of --init were initialized and trained.
_OF_THE_WEIGHTS = (
    *("tied", "parametrization", "scaled_embedding", "stack", "width"),
    *("share_layers", "attention.heads", "vocab"),
)
_OLD_SEQ = 2048  # the length of rows before architectures had their own
_VERIFY_BYTES = 4 * 2**30  # a second or two from a warm disk
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, and either under WSL


@dataclass(frozen=True, slots=True)
class Devices:
    """The GPUs of a node, or its CPUs, and their memory."""

    gpus: int
    memory_bytes: int | None  # of one GPU, or of the host without any; None: not known here
    name: str
    host_bytes: int | None = None  # beside GPUs; None: not known here

    @classmethod
    def here(cls) -> "Devices":
        host = psutil.virtual_memory().available
        if any(Path(driver).exists() for driver in _DRIVERS):
            import torch  # takes seconds, which a node without a GPU need not spend

            if torch.cuda.is_available():
                gpu = torch.cuda.get_device_properties(0)
                return cls(torch.cuda.device_count(), gpu.total_memory, gpu.name, host)
        return cls(0, host, "CPU")

    @classmethod
    def of(cls, cluster: Cluster, gpus: int) -> "Devices":
        """Describe a cluster's node from its file, because a login node has other devices."""
        return cls(gpus, cluster.memory_bytes if gpus else None, cluster.device or "GPU")

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.memory_bytes, self.name, shared=not self.gpus)


@dataclass(frozen=True, slots=True)
class Request:
    """The user's options. None leaves a value to the config."""

    size: str | None = None
    arch: str | None = None
    data: Path | None = None
    out: Path | None = None
    nproc: int = 1
    cluster: str | None = None
    file: Path | None = None
    sets: Sequence[str] = ()
    over: dict[str, Any] | None = None
    resume: bool = False
    fresh: bool = False  # without an `out`, create a new directory beside existing ones
    fewest: int | None = None  # processes of a job that may start with fewer than nproc
    branch: Path | None = None  # a longer run from whose plateau this one branches
    init: Path | None = None  # a run with whose model and weights this one starts
    defaults: dict[str, Any] | None = None  # of the command, below what the user gives

    @property
    def layers(self) -> dict[str, Any]:
        """The layers that the user gave, as the config functions name them."""
        names = ("cluster", "file", "sets", "over")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that was checked but not yet written."""

    run: RunDir
    config: RunConfig
    facts: dict[str, Any] | None  # None: the run exists
    fresh: bool = False
    note: str = ""  # for the user: how the layout was chosen, what a setting lacks

    def commit(self) -> "PlannedRun":
        """Lock the run directory, then create the run or check that it can continue."""
        planned = self
        while not planned._claim():
            planned = self._next_directory()
        return planned

    def _claim(self) -> bool:
        """Return False if another process has the directory and a new one may be used instead."""
        try:
            self.run.lock(".launch")  # before anything is in the directory
            if self.facts is not None and self.run.exists:
                raise _exists(self.run)
            if not (self.facts or {}).get("branch"):  # which replaces old checkpoints
                self.run.check_whole()
        except RunError:
            if self.fresh and self.run.path.exists():
                return False
            raise
        if self.facts is None:
            self.run.continue_with(self.config)
            return True
        branch = self.facts.get("branch")
        if branch:
            copy_trunk(self.run, RunDir(Path(branch["of"])), branch["step"])
        self.run.create(self.config, {**self.facts, "name": self.config.name})
        return True

    def _next_directory(self) -> "PlannedRun":
        """Return the same run in the first free directory of 1b-2, 1b-3 and so on."""
        parent = self.run.path.parent
        stem = self.config.name[:58]  # a name has at most 64 characters
        number = 2
        while (parent / f"{stem}-{number}").exists():
            number += 1
        name = f"{stem}-{number}"
        config = self.config.model_copy(update={"name": name})
        return replace(self, run=RunDir(parent / name), config=config)


def plan_run(request: Request, devices: Devices) -> PlannedRun:
    """Plan a run, and refuse everything that can be refused before anything is written."""
    if request.out is not None:
        check_path(request.out)
    if request.size is not None and request.init is not None:
        both = f"--size {request.size} and --init {request.init}"
        raise ConfigError(f"{both} both give a model; remove one of them")
    if request.size is None and request.arch is not None:
        new = "" if request.init else ", or give the --size of a new run"
        raise ConfigError(f"--arch {request.arch} has no effect without --size; remove it{new}")
    if request.size is None and request.init is None:
        return _continue(request, devices)
    if request.data is None:
        example = "launch data prepare --source python --out data/python"
        raise ConfigError(f"--data is missing; make shards with `{example}`")
    corpus = _open_corpus(request.data)
    spec = _load(request, corpus)
    run = RunDir(request.out or Path("runs") / spec.experiment / spec.name)
    before = reload(run.config) if run.exists and request.resume else None
    if before and request.size and before.model.seq != spec.model.seq:
        # The run may be from an older release, with that release's default length.
        defaults = merge({"model": {"seq": _OLD_SEQ}}, request.defaults or {})
        older = _load(replace(request, defaults=defaults), corpus)
        spec = older if older.model.seq == before.model.seq else spec

    def resized(size: str) -> RunSpec:
        return _load(replace(request, size=size), corpus)

    config, note = _fit(spec, before, request, devices, None if before or request.init else resized)
    fresh = request.fresh and request.out is None
    if run.exists and not fresh and not request.resume:
        raise _exists(run)
    check_disk(config, run.path, request.nproc)
    if run.exists and not fresh:
        return PlannedRun(run, config, None, note=note)
    fp8 = "" if request.init or request.branch else _fp8_warning(config)
    note = "\n".join(filter(None, (note, fp8, _late_warning(config))))
    train = corpus.manifest.splits["train"]
    about = facts(
        config,
        tokenizer=corpus.manifest.tokenizer.fingerprint,
        bytes_per_token=train.bytes / train.tokens,
        peak_flops=config.cluster.peak_flops if config.cluster.has(devices.name) else None,
    ) | {"world": request.nproc}
    if request.branch is not None and not run.exists:
        step = branch_step(config, RunDir(request.branch))
        about["branch"] = {"of": str(request.branch), "step": step}
    return PlannedRun(run, config, about, fresh, note)


def _exists(run: RunDir) -> RunError:
    remedy = "add --resume to continue it or give another --out"
    return RunError(f"--out {run.path} already contains a run; {remedy}")


def _fp8_warning(config: RunConfig) -> str:
    model = config.model
    scaled = model.tied or model.embedding_scale * model.embedding_multiplier != 1
    # A recipe with a large initial embedding (muon) refuses the setting.
    scaled = scaled or model.embedding_std is not None
    if scaled or not config.train.fp8:
        return ""
    return (
        "train.fp8=true without model.scaled_embedding=true: the loss of a wide model may stay 2% "
        "above bf16 (docs/TRAINING.md)"
    )


def _late_warning(config: RunConfig) -> str:
    # It is no error, because a trunk and shorter branches may share a file of settings.
    late = [step for step in config.train.keep_at if step > config.train.steps]
    return f"train.keep_at={late} has no effect after the last step" if late else ""


def _continue(request: Request, devices: Devices) -> PlannedRun:
    """Plan the run of a directory, with the changes that a resumed run may make."""
    if not request.resume:
        raise ConfigError("--size is missing; `launch show --sizes` lists all sizes")
    if request.out is None or not RunDir(request.out).exists:
        given = "no run" if request.out is None else f"{request.out}, which is not a run"
        raise RunError(f"--resume got {given}; give the --out of a run, or options for a new one")
    run = RunDir(request.out)
    # The shards may be at another path now; the hash of their manifest must be the same.
    moved = {} if request.data is None else {"data": {"dir": str(request.data)}}
    asked = reload(run.config, [moved], **request.layers)
    config, note = _fit(asked, reload(run.config), request, devices, None)
    if not run.finished:
        check_disk(config, run.path, request.nproc)
    if not run.finished or request.data is not None:
        _open_corpus(Path(config.data.dir or ".")).check_same(config.data)
    return PlannedRun(run, config, None, note=note)


def _open_corpus(path: Path) -> Corpus:
    """Open the data and check its checksums, unless that takes minutes."""
    corpus = Corpus.open(path)
    size = sum(file.stat().st_size for file in path.rglob("*.bin"))
    return Corpus.open(path, verify=True) if size < _VERIFY_BYTES else corpus


def _load(request: Request, corpus: Corpus) -> RunSpec:
    # The run is named after its directory; without one, after its size.
    name = request.out or request.init
    data = {"dir": str(request.data), "hash": corpus.manifest.hash}
    layer: dict[str, Any] = {"data": data, "name": request.size}
    if name is not None:
        layer["name"] = re.sub(r"[^\w.-]", "-", name.resolve().name)[:64]
    pairs = corpus.manifest.pairs
    if pairs:  # they serve no other objective
        layer["objective"] = {"kind": "pairs", "languages": list(pairs)}
    before = None
    pieces: int | None = corpus.manifest.tokenizer.vocab
    if request.init is not None:
        pieces = None  # the weights have a vocabulary already
        # Imports torch, which takes seconds.
        from pipeline.checkpoint.format import CONFIG
        from pipeline.checkpoint.restore import check_initial_weights, starting_point

        remedy = "prepare the data with --tokenizer, the .model file of that run"
        found = corpus.manifest.tokenizer.fingerprint
        same_tokenizer(request.init, found, f"--data {request.data}", remedy)
        start = starting_point(request.init)
        before = reload(start / CONFIG)
        layer["init"] = str(start.resolve())
        if not pairs or isinstance(before.objective, Pairs):
            layer["objective"] = before.objective.model_dump()
    layer = merge(layer, request.defaults or {})
    spec = load(
        size=request.size,
        arch=request.arch,
        model=None if before is None else before.model.model_dump(exclude_none=True),
        data=layer,
        pieces=pieces,
        **request.layers,
    )
    refuse_idle(spec, request.sets)
    if isinstance(spec.objective, Denoise) and spec.objective.permute and not spec.objective.stops:
        spec = changed(spec, {"objective.stops": corpus.sentence_ends()})
    # A --config or --set may name other data than --data, which the run would fail to open.
    for key, value in data.items():
        other = getattr(spec.data, key)
        if other != value:
            raise ConfigError(f"data.{key}={other} is not that of --data {request.data}; remove it")
    if spec.init != layer.get("init"):
        text = f"init={spec.init}: a run starts from its --init (`launch finetune`: --run)"
        raise ConfigError(f"{text}; remove `init` from --set and --config")
    if spec.lora is not None and spec.init is None:
        text = f"lora.rank={spec.lora.rank} needs trained weights, because LoRA keeps them"
        raise ConfigError(f"{text}; give a run with --init, or remove it")
    if before is not None and request.init is not None:
        _check_weights(spec.model, before.model, request.init)
        if spec.init is not None:  # None: `launch finetune --scratch`
            check_initial_weights(spec.model, start)
    _check_corpus(corpus, spec)
    return changed(spec, {"eval.tasks": _task_files(spec)})


def _task_files(spec: RunSpec) -> tuple[str, ...]:
    """Return absolute paths, because a job may start in another directory; refuse bad files."""
    tasks = tuple(str(Path(file).absolute()) for file in spec.eval.tasks)
    try:
        found = read_tasks(tasks)
    except DataError as error:
        raise DataError(f"eval.tasks: {error}") from None
    for task in found:
        if task.name in ("labels", "in_context"):  # other figures in the log begin with these
            raise ConfigError(f"eval.tasks: {task.name} is a reserved name; rename the file")
    return tasks


def _check_weights(own: Model, weights: Model, source: Path) -> None:
    """Refuse a model that cannot start from the weights of another one."""
    read = {key: attrgetter(key) for key in (*_OF_THE_WEIGHTS, "layers", "encoder_layers", "seq")}
    wrong = [key for key in _OF_THE_WEIGHTS if read[key](own) != read[key](weights)]
    # An encoder may start from a decoder, and a model from some of the layers (restore.py).
    if own.stack == "encoder" and weights.stack == "decoder":
        wrong.remove("stack")
    if own.vocab > weights.vocab:  # further ids, such as a mask's, have new rows
        wrong.remove("vocab")
    for key, depth in (("layers", "layers"), ("encoder_layers", "source_layers")):
        if getattr(own, depth) > getattr(weights, depth):
            wrong.append(key)
    if isinstance(own.position, Learned) and own.learned_positions != weights.learned_positions:
        wrong.append("seq")
    if wrong:
        key = wrong[0]
        asked, was = (json.dumps(read[key](model)) for model in (own, weights))
        text = f"the weights of {source} were trained with {was}"
        raise ConfigError(f"model.{key}={asked}: {text}; remove this setting")


def _check_corpus(corpus: Corpus, spec: RunSpec) -> None:
    """Refuse data that does not serve the objective, the vocabulary or the teacher."""
    check_pairs(corpus, spec)
    corpus.check(spec, "train", "valid")
    if spec.objective.examples:
        kind = "masked" if spec.model.stack == "encoder" else "causal"
        text = f"--set objective.kind={kind} --set model.seq={spec.model.longest}"
        if spec.model.row_classes:
            text += " --set model.row_classes=0"
        corpus.check_rows(spec.text_length, f"; or train on text with {text}")
    if spec.distill is not None:
        remedy = "give a teacher that was trained with the tokenizer of the data"
        teacher = Path(spec.distill.teacher)
        same_tokenizer(teacher, corpus.manifest.tokenizer.fingerprint, "--data", remedy)


def _fit(
    spec: RunSpec,
    before: RunConfig | None,
    request: Request,
    devices: Devices,
    resized: Resized | None,
) -> tuple[RunConfig, str]:
    """Return every number for this many processes, and how the layout was chosen."""
    check_one_micro_batch(spec, before.train.micro_batch if before else None)
    if before is not None:
        spec = _as_before(spec, before, request.nproc)
    config, note = fit_to_devices(
        spec,
        request.nproc,
        devices.memory,
        keep=before is not None,
        resized=resized,
        fewest=request.fewest,
    )
    if request.fewest:  # of a job, whose nodes cannot be inspected from here
        fit_to_devices(config, request.fewest, devices.memory)
    else:
        check_offload(config, request.nproc, devices.host_bytes)
    return config, note


def _as_before(spec: RunSpec, before: RunConfig, ranks: int) -> RunSpec:
    """Keep the global batch of a run that continues; how the ranks divide it may change."""
    asked = spec.train
    was = before.train
    batch = was.batch_tokens if asked.batch_tokens == "auto" else asked.batch_tokens
    micro = asked.micro_batch
    if micro in ("auto", was.micro_batch):
        divides = batch // spec.model.seq * spec.parallel.sp % (ranks * was.micro_batch) == 0
        # With --auto-batch now and not before, the search starts here.
        found = was.auto_batch or not asked.auto_batch
        micro = was.micro_batch if divides and found else "auto"
    change: dict[str, object] = {"train.batch_tokens": batch, "train.micro_batch": micro}
    if asked.recompute == "auto":
        change["train.recompute"] = was.recompute
    if spec.parallel.zero == "auto":
        change["zero"] = before.parallel.zero
    if spec.parallel.ep == "auto" and ranks % before.parallel.ep == 0:
        change["ep"] = before.parallel.ep
    return changed(RunSpec.model_validate(spec.model_dump()), change)
