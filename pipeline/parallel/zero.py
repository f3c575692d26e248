"""The engine: DeepSpeed ZeRO, on one CPU process as on a cluster. The only file that imports deepspeed."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.model.stack import Decoder, Losses
from pipeline.optim.groups import adamw, set_rate
from pipeline.parallel.engine import Micro, Update, balance
from pipeline.parallel.world import TIMEOUT, World

# DeepSpeed's autotuner, which we do not use, imports mlflow where it finds it: seconds in every process, and a tracker
# inside the training. It takes None for an answer.
if hide := "mlflow" not in sys.modules:
    sys.modules["mlflow"] = None  # type: ignore[assignment]
import deepspeed

if hide:
    del sys.modules["mlflow"]

_TAG = "engine"


class ZeroEngine:
    def __init__(self, config: RunConfig, model: Decoder, world: World) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        if world.device.type == "cpu":
            # DeepSpeed would compile a shared-memory all-reduce that only inference uses: a minute, and a C++ compiler.
            # Through sys.modules, since `deepspeed.comm.torch` as an attribute is the real torch.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        deepspeed.init_distributed(dist_backend=world.backend, timeout=TIMEOUT, verbose=False)
        self._clip, self._world = config.optim.clip, world
        self._unsharded = config.parallel.zero == 0 and config.train.dtype == "fp32"
        optimizer = adamw(model.to(world.device), config)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_config(config, world)
        )

    def update(self, micros: Sequence[Micro], lr: float) -> Update:
        set_rate(self._optimizer, lr)
        self._engine.train()
        nlls, routings, norm = [], [], None
        for micro in micros:
            losses: Losses = self._engine(*micro)
            self._engine.backward(losses.total)
            if self._unsharded and self._engine.is_gradient_accumulation_boundary():
                # with neither ZeRO nor a master copy DeepSpeed clips but does not keep the norm
                norm = torch.nn.utils.get_total_norm(
                    [p.grad for p in self._engine.module.parameters() if p.grad is not None]
                )
            self._engine.step()
            nlls.append(losses.nll.detach())
            routings.append(losses.routing)
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        return Update(torch.stack(nlls).mean(), norm, balance(self._engine.module, routings, self._world))

    @torch.no_grad()
    def evaluate(self, micro: Micro) -> Tensor:
        self._engine.eval()
        losses: Losses = self._engine(*micro)
        return losses.nll

    def save(self, directory: Path) -> None:
        self._engine.save_checkpoint(str(directory), tag=_TAG, save_latest=False)

    def load(self, directory: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(directory), tag=_TAG)
        if path is None:
            raise RunError(f"checkpoint {directory} holds no engine state; resume from another or start anew")


def _config(config: RunConfig, world: World) -> dict[str, Any]:
    train, micro = config.train, config.train.micro_batch
    assert train.batch_tokens != "auto" and micro != "auto", "resolve the recipe first"
    rows = train.batch_tokens // config.model.seq
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": rows // micro // world.size,
        "gradient_clipping": config.optim.clip,
        "bf16": {"enabled": train.dtype == "bf16"},
        "zero_optimization": {"stage": config.parallel.zero},
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW: no op to compile, same numbers
        "steps_per_print": 2**31,
    }
