"""The engine: DeepSpeed ZeRO, on one CPU process as on a cluster."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.schema import Offload, RunConfig
from pipeline.model.stack import Block, Decoder, Losses
from pipeline.optim.groups import adamw, gate_step, set_learning_rate
from pipeline.parallel import fragments
from pipeline.parallel.engine import Accept, Clock, Held, Micro, Update, always, balance, untimed
from pipeline.parallel.fragments import Fragment, Piece, on_disk
from pipeline.parallel.world import TIMEOUT, World

# DeepSpeed's autotuner, which we do not use, imports mlflow where it finds it: seconds in every process, and a tracker
# inside the training. It takes None for an answer.
if hide := "mlflow" not in sys.modules:
    sys.modules["mlflow"] = None  # type: ignore[assignment]
import deepspeed
from deepspeed.runtime import compiler
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import groups, safe_get_full_grad, set_z3_leaf_modules

if hide:
    del sys.modules["mlflow"]
# Its Muon, which it imports whatever the optimizer, has functions to be compiled: that alone would import the compiler.
_compile, compiler.compile = compiler.compile, lambda: lambda function: function
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402

compiler.compile = _compile


class ZeroEngine:
    def __init__(self, config: RunConfig, model: Decoder, world: World) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if world.device.type == "cpu":
            # DeepSpeed would compile a shared-memory all-reduce that only inference uses: a minute, and a C++ compiler.
            # Through sys.modules, since `deepspeed.comm.torch` as an attribute is the real torch.
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        # The process group exists (world.join); without one, DeepSpeed would look for MPI.
        deepspeed.init_distributed(
            dist_backend=world.backend, timeout=TIMEOUT, verbose=False, auto_mpi_discovery=False
        )
        self._world, self._zero, self._ep = world, config.parallel.zero, config.parallel.ep
        self.clock: Clock = untimed
        self._clip = config.optim.clip
        self._home = (
            torch.device("cpu") if config.parallel.offload.optimizer else world.device
        )  # where Adam works
        self._unsharded = self._zero == 0 and config.train.dtype == "fp32"
        if self._zero == 3:
            set_z3_leaf_modules(
                model, [Block]
            )  # gathered as one: no hook, and no break of the graph, inside a block
        optimizer = adamw(model.to(world.device), config)
        set_learning_rate(optimizer, 0.0)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_config(config, world)
        )
        if self._zero == 0 and not self._unsharded:
            self.optimizer.state.clear()  # DeepSpeed has taken a step with gradients of zero, at the rate of zero
        assert self._engine.has_moe_layers == (self._ep > 1), (
            "DeepSpeed did not recognise the routed layers"
        )
        self._ask_before_stepping()
        if config.parallel.offload.nvme:
            self._move_to_disk(config.parallel.offload)

    def update(self, micros: Sequence[Micro], lr: float, accept: Accept = always) -> Update:
        set_learning_rate(self._optimizer, lr)
        self._engine.train()
        nlls: list[Tensor] = []
        routings = []
        self._accept: Callable[[Tensor], Tensor] = lambda norm: accept(
            torch.stack(nlls).mean(), norm
        )
        for micro in micros:
            with self.clock("forward"):
                losses: Losses = self._engine(*micro)
            with self.clock("backward"):
                self._engine.backward(losses.total)
            nlls.append(losses.nll.detach())
            routings.append(losses.routing)
            if self._zero == 0 and self._engine.is_gradient_accumulation_boundary():
                # clipped by us: DeepSpeed would count on each rank only the experts that lie there
                self._ask(self._norm_of_copies())
                if self._unsharded:
                    self._clip_copies(self._engine.module.parameters())
            with self.clock("optimizer"):
                self._engine.step()
        routing = balance(self._engine.module, routings, self._world, self._taken)
        return Update(torch.stack(nlls).mean(), self._grad_norm, routing)

    @torch.no_grad()
    def _move_to_disk(self, offload: Offload) -> None:
        """What DeepSpeed keeps in host memory becomes mapped files: no op to build, and everything stays a tensor to
        whoever reads it. Its own NVMe swapping leaves a checkpoint nothing to look at."""
        wrapper, room = self._optimizer, partial(on_disk, folder=str(offload.path))
        if offload.params == "nvme":
            for group, flat in enumerate(wrapper.fp16_partitioned_groups_flat):
                wrapper.fp16_partitioned_groups_flat[group] = mapped = room(flat)
                wrapper._move_to_flat_buffer(wrapper.fp16_groups[group], mapped)
            wrapper.param_groups_fp16_flat_cpu_memory.clear()
        if offload.optimizer == "nvme":
            for master in wrapper.fp32_partitioned_groups_flat:
                master.data = room(master).copy_(master)
            fragments.ready(self._pieces(), self.optimizer, room)

    def _ask(self, norm: Tensor) -> Tensor:
        self._grad_norm, self._taken = norm, self._accept(norm)
        gate_step(self.optimizer, self._taken.to(self._home))
        return norm

    def _clip_copies(self, parameters: Iterable[Tensor]) -> None:
        torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, self._grad_norm)

    def _ask_before_stepping(self) -> None:
        """DeepSpeed 0.19.8 reads the norm of each step, to discard one that overflowed. `accept` judges that on the
        device, so each of its four optimizers goes on unasked, and clips by the norm that was asked about."""
        wrapper: Any = self._optimizer
        for module in (stage_1_and_2, stage3):
            module.is_invalid_grad_norm = lambda _norm: False
        if self._zero == 0 and not self._unsharded:
            masters = [master for group in wrapper.fp32_groups for master in group]
            unfused_optimizer.get_weight_norm = lambda *_, **__: 0.0
            wrapper.overflow_checker.check = lambda: False
            wrapper.unscale_and_clip_grads = lambda _norm: self._clip_copies(masters)
        elif self._zero in (1, 2):
            norm_of, wrapper.get_grad_norm_direct = wrapper.scaled_global_norm, self._norm_of_parts
            wrapper.check_grad_overflow, wrapper.scaled_global_norm = (
                False,
                lambda: self._ask(norm_of()),
            )
        elif self._zero == 3:
            norms_of, wrapper.get_grad_norm_direct = wrapper._get_norm_groups, self._norm_of_parts
            wrapper._get_norm_groups = lambda: [self._ask(combine_grad_norm_groups(norms_of()))]

    def _norm_of_parts(self, gradients: Sequence[Tensor], _params: Sequence[Tensor]) -> Tensor:
        """Of the parts that the ranks have of a group, in one pass: DeepSpeed copies each gradient to fp64 first."""
        mine = [gradient for gradient in gradients if not hasattr(gradient, "_zero_padding")]
        none = torch.zeros((), dtype=torch.float64, device=self._world.device)
        norms = torch._foreach_norm(mine, 2, dtype=torch.float64) if mine else ()
        squares = torch.stack([none, *norms]).square().sum().float()
        dist.all_reduce(squares, group=self._optimizer.dp_process_group)
        return squares.sqrt()

    def _norm_of_copies(self) -> Tensor:
        """Shared experts are counted where they lie, once."""
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        own, shared = (
            [p.grad for p in parameters if hasattr(p, "group_name") == kind]
            for kind in (False, True)
        )
        squares = _norm(own).square()
        if self._ep > 1:
            squares += self._world.reduce(_norm(shared).square()) * self._ep / self._world.size
        return squares.sqrt()

    @torch.no_grad()
    def evaluate(self, micro: Micro) -> Tensor:
        self._engine.eval()
        losses: Losses = self._engine(*micro)
        return losses.nll

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self._engine.basic_optimizer
        return inner

    @property
    def module(self) -> nn.Module:
        inner: nn.Module = self._engine.module
        return inner

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._engine.module.named_parameters():
            yield name, p.grad if self._zero == 0 else safe_get_full_grad(p)

    def held(self) -> Held:
        module, wrapper = self._engine.module, self._optimizer
        buffers = list(module.buffers())
        if self._zero == 3:  # no rank has a copy of another's weights
            return Held(
                buffers,
                [flat for flat in wrapper.fp16_partitioned_groups_flat if flat is not None],
                [],
            )
        if self._zero:
            experts = map(wrapper.is_moe_group, wrapper.optimizer.param_groups)
            flats = list(zip(wrapper.bit16_groups_flat, experts, strict=True))
            weights, shared = (
                [t for t, expert in flats if expert == kind] for kind in (False, True)
            )
            return Held([*buffers, *weights], [], [], shared)
        copies: list[Tensor] = []
        own: list[Tensor] = []
        for parameter in module.parameters():
            (own if hasattr(parameter, "group_name") else copies).append(parameter)
        gradients, others = ([p.grad for p in some if p.grad is not None] for some in (copies, own))
        masters = (
            [] if self._unsharded else [master for group in wrapper.fp32_groups for master in group]
        )
        return Held([*buffers, *copies], masters, gradients, own, others)

    def state(self, *, share: bool = False) -> list[Fragment]:
        pieces = list(self._pieces())
        fragments.ready(pieces, self.optimizer)
        everywhere = (self._world.rank, self._world.size)
        return [
            *fragments.state(pieces, self.optimizer, share=share),
            *fragments.buffers(self._engine.module, everywhere, share=share),
        ]

    def _pieces(self) -> Iterator[Piece]:
        """Where DeepSpeed 0.19.8 keeps the fp32 masters: four ways, by stage and dtype."""
        wrapper = self._optimizer
        masters: dict[int, Tensor] = {}
        if self._zero == 0 and not self._unsharded:
            for weights, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                masters.update(zip(map(id, weights), copies, strict=True))
        for name, p in self._engine.module.named_parameters():
            if self._zero == 0:
                yield Piece(name, p, masters.get(id(p), p), 0, 0, p.numel(), self._replica(p))
            elif self._zero < 3:
                if (held := p._hp_mapping) is not None:
                    master = self.optimizer.param_groups[held.param_group_index]["params"][0]
                    at, run = held.hp_fragment_address, held.lp_fragment_address
                    yield Piece(name, p, master, at.start, run.start, at.numel)
            else:
                group, start, numel = wrapper.grad_position[wrapper.get_param_id(p)]
                offset = (
                    dist.get_rank(p.ds_process_group) * numel
                )  # the last partitions end in padding
                held = max(0, min(numel, p.ds_numel - offset))
                yield Piece(
                    name, p, wrapper.fp32_partitioned_groups_flat[group], start, offset, held
                )

    def _replica(self, p: torch.nn.Parameter) -> tuple[int, int]:
        if (
            name := getattr(p, "group_name", None)
        ) is not None:  # an expert: its copies are in another group
            return groups._get_expert_data_parallel_rank(
                name
            ), groups._get_expert_data_parallel_world_size(name)
        return self._world.rank, self._world.size

    @torch.no_grad()
    def adopt(self) -> None:
        wrapper = self._optimizer
        if self._zero == 3:
            wrapper.checkpoint_event_prologue()
            for group in range(len(wrapper.fp16_groups)):
                wrapper._reassign_or_swap_out_partitioned_parameters(group)
            wrapper.checkpoint_event_epilogue()
        elif self._zero:
            wrapper.update_lp_params()
        elif not self._unsharded:
            for weights, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                for weight, copy in zip(weights, copies, strict=True):
                    weight.copy_(copy)


def _norm(tensors: list[Tensor]) -> Tensor:
    """As torch's own clipping has it, but not in bf16."""
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    )
    return norm


def _config(config: RunConfig, world: World) -> dict[str, Any]:
    train, micro = config.train, config.train.micro_batch
    assert micro != "auto", "resolve the recipe first"
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": config.rows // micro // (world.size // config.parallel.sp),
        "gradient_clipping": config.optim.clip if config.parallel.zero else 0.0,
        "bf16": {"enabled": train.dtype == "bf16"},
        "zero_optimization": {
            "stage": config.parallel.zero,
            "memory_efficient_linear": False,  # for its sake each block would be compiled anew
            **_offload(config.parallel.offload),
        },
        "zero_allow_untested_optimizer": True,  # torch's fused AdamW: no op to compile, same numbers, on a CPU too
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "timers": {
            "throughput": {"enabled": False}
        },  # they wait for the device twice in every micro-batch
    }


def _offload(to: Offload) -> dict[str, Any]:
    places = {"offload_optimizer": to.optimizer, "offload_param": to.params}
    return {part: {"device": "cpu"} for part, place in places.items() if place}
