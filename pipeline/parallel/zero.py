"""The DeepSpeed ZeRO engine, for one CPU process as well as for a cluster."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.schema import Offload, RunConfig
from pipeline.model.block import Block
from pipeline.model.head import Losses
from pipeline.model.stack import Decoder
from pipeline.objective.batch import Micro
from pipeline.optim.groups import build_optimizer, gate_step, set_learning_rate
from pipeline.parallel import engine, fragments
from pipeline.parallel.fragments import Piece, on_disk
from pipeline.parallel.muon_shards import bind
from pipeline.parallel.world import TIMEOUT, World

# DeepSpeed's autotuner, which we do not use, imports mlflow if it is installed. That takes seconds
# in every process, and training must not import a tracker. None in sys.modules prevents this.
if hide_mlflow := "mlflow" not in sys.modules:
    sys.modules["mlflow"] = None  # type: ignore[assignment]
import deepspeed
from deepspeed.runtime import compiler
from deepspeed.runtime.fp16 import unfused_optimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.utils import groups, safe_get_full_grad, set_z3_leaf_modules

if hide_mlflow:
    del sys.modules["mlflow"]
# For any optimizer, DeepSpeed imports its own Muon, whose decorators would import torch's compiler.
_compile = compiler.compile
compiler.compile = lambda: lambda function: function
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402

compiler.compile = _compile


class ZeroEngine(engine.Engine):
    def __init__(self, config: RunConfig, model: Decoder, world: World) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        if world.device.type == "cpu":
            # DeepSpeed would compile an all-reduce that only inference uses, which takes a minute.
            # From sys.modules, because the attribute `deepspeed.comm.torch` is the real torch.
            comm: Any = sys.modules["deepspeed.comm.torch"]
            comm.build_shm_op = lambda: None
            # Otherwise DeepSpeed runs numactl for every micro-batch of ZeRO-3, to count devices.
            os.environ.setdefault("LOCAL_SIZE", str(world.size))
        # The process group exists (world.join); without one, DeepSpeed would look for MPI.
        deepspeed.init_distributed(
            dist_backend=world.backend, timeout=TIMEOUT, verbose=False, auto_mpi_discovery=False
        )
        self.world = world
        self._zero = config.parallel.zero
        self._ep = config.parallel.ep
        self._clip = config.optim.clip
        offloaded = config.parallel.offload.optimizer is not None
        self._adam_device = torch.device("cpu") if offloaded else world.device
        # In fp32 at ZeRO-0 there is no wrapper around the optimizer, and no separate masters.
        self._unwrapped = self._zero == 0 and config.train.dtype == "fp32"
        if self._zero == 3 and not config.model.share_layers:
            # Gather whole blocks, without hooks and graph breaks inside. A shared block would give
            # DeepSpeed a gradient for every use.
            set_z3_leaf_modules(model, [Block])
        optimizer = build_optimizer(model.to(world.device), config)
        set_learning_rate(optimizer, 0.0)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_deepspeed_config(config, world)
        )
        self.wrapped = self._engine
        if self._zero == 0 and not self._unwrapped:
            # DeepSpeed took a step with gradients of zero, at the learning rate of zero.
            self.optimizer.state.clear()
        bind(self.optimizer, self.pieces(), world)
        routed = self._engine.has_moe_layers
        assert routed == (self._ep > 1), "DeepSpeed did not recognize the routed layers"
        self._call_accept_before_stepping()
        if config.parallel.offload.nvme:
            self._move_to_disk(config.parallel.offload)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self._engine.basic_optimizer
        return inner

    @property
    def module(self) -> nn.Module:
        inner: nn.Module = self._engine.module
        return inner

    # --- the step

    def forward_backward(self, micros: Sequence[Micro]) -> engine.Passes:
        self._engine.train()
        nlls: list[Tensor] = []
        routings = []
        for micro in micros:
            if nlls:
                # DeepSpeed counts micro-batches in its own step(), which writes at the last one.
                with self.clock("optimizer"):
                    self._engine.step()
            with self.clock("forward"):
                losses: Losses = self._engine(**micro.inputs)
            with self.clock("backward"):
                self._engine.backward(losses.total)
            nlls.append(losses.nll.detach())
            routings.append(losses.routing)
        return engine.Passes(torch.stack(nlls).mean(), routings)

    def step(
        self, passes: engine.Passes, lr: float, accept: engine.Accept = engine.accept_always
    ) -> engine.Update:
        set_learning_rate(self._optimizer, lr)
        self._accept: Callable[[Tensor], Tensor] = lambda norm: accept(passes.nll, norm)
        if self._zero == 0:
            # DeepSpeed does not clip here, because its norm would count only local experts.
            self._judge(self._norm_of_copies())
            if self._unwrapped:
                self._clip_gradients(self._engine.module.parameters())
        with self.clock("optimizer"):
            self._engine.step()
        routing = engine.balance(self._engine.module, passes.routings, self.world, self._apply)
        return engine.Update(passes.nll, self._grad_norm, routing)

    def _judge(self, norm: Tensor) -> Tensor:
        """Call `accept` with the gradient norm, and gate the optimizer's step with the result."""
        self._grad_norm = norm
        self._apply = self._accept(norm)
        gate_step(self.optimizer, self._apply.to(self._adam_device))
        return norm

    def _clip_gradients(self, parameters: Iterable[Tensor]) -> None:
        torch.nn.utils.clip_grads_with_norm_(parameters, self._clip, self._grad_norm)

    def _call_accept_before_stepping(self) -> None:
        """Replace DeepSpeed's test for overflow, which reads the norm of each step on the host.

        `accept` judges the norm on the device. So each of DeepSpeed's four optimizers (0.19.8)
        always steps, and clips by the norm that `accept` was called with."""
        wrapper: Any = self._optimizer
        for module in (stage_1_and_2, stage3):
            module.is_invalid_grad_norm = lambda _norm: False
        if self._zero == 0 and not self._unwrapped:
            masters = [master for group in wrapper.fp32_groups for master in group]
            unfused_optimizer.get_weight_norm = lambda *_, **__: 0.0
            wrapper.overflow_checker.check = lambda: False
            wrapper.unscale_and_clip_grads = lambda _norm: self._clip_gradients(masters)
        elif self._zero in (1, 2):
            global_norm = wrapper.scaled_global_norm
            wrapper.get_grad_norm_direct = self._norm_of_parts
            wrapper.check_grad_overflow = False
            wrapper.scaled_global_norm = lambda: self._judge(global_norm())
        elif self._zero == 3:
            group_norms = wrapper._get_norm_groups
            wrapper.get_grad_norm_direct = self._norm_of_parts
            wrapper._get_norm_groups = lambda: [
                self._judge(combine_grad_norm_groups(group_norms()))
            ]

    def _norm_of_parts(self, gradients: Sequence[Tensor], _params: Sequence[Tensor]) -> Tensor:
        """Return the norm of a partitioned parameter group. DeepSpeed's own makes fp64 copies."""
        own = [gradient for gradient in gradients if not hasattr(gradient, "_zero_padding")]
        none = torch.zeros((), dtype=torch.float64, device=self.world.device)
        norms = torch._foreach_norm(own, 2, dtype=torch.float64) if own else ()
        squares = torch.stack([none, *norms]).square().sum().float()
        dist.all_reduce(squares, group=self._optimizer.dp_process_group)
        return squares.sqrt()

    def _norm_of_copies(self) -> Tensor:
        """Return the norm at ZeRO-0. Experts are summed over ranks, and each counts once."""
        parameters = [p for p in self._engine.module.parameters() if p.grad is not None]
        squares = _norm([p.grad for p in parameters if not _is_expert(p)]).square()
        if self._ep > 1:
            experts = _norm([p.grad for p in parameters if _is_expert(p)])
            squares += self.world.reduce(experts.square()) * self._ep / self.world.size
        return squares.sqrt()

    # --- the tensors of a rank

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self._engine.module.named_parameters():
            yield name, p.grad if self._zero == 0 else safe_get_full_grad(p)

    def local_tensors(self) -> engine.LocalTensors:
        module = self._engine.module
        wrapper = self._optimizer
        buffers = list(module.buffers())
        if self._zero == 3:  # no rank has a copy of another's weights
            flats = [flat for flat in wrapper.fp16_partitioned_groups_flat if flat is not None]
            return engine.LocalTensors(buffers, flats, [])
        weights: list[Tensor] = []
        experts: list[Tensor] = []
        if self._zero:
            param_groups = wrapper.optimizer.param_groups
            for flat, group in zip(wrapper.bit16_groups_flat, param_groups, strict=True):
                (experts if wrapper.is_moe_group(group) else weights).append(flat)
            return engine.LocalTensors([*buffers, *weights], [], [], experts)
        for p in module.parameters():
            (experts if _is_expert(p) else weights).append(p)
        gradients = [p.grad for p in weights if p.grad is not None]
        expert_gradients = [p.grad for p in experts if p.grad is not None]
        masters = []
        if not self._unwrapped:
            masters = [master for group in wrapper.fp32_groups for master in group]
        return engine.LocalTensors(
            [*buffers, *weights], masters, gradients, experts, expert_gradients
        )

    def pieces(self) -> Iterator[Piece]:
        """Find the masters, which DeepSpeed 0.19.8 keeps in four ways, by stage and dtype."""
        wrapper = self._optimizer
        masters: dict[int, Tensor] = {}
        if self._zero == 0 and not self._unwrapped:
            for weights, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                masters.update(zip(map(id, weights), copies, strict=True))
        for name, p in self._engine.module.named_parameters():
            if self._zero == 0:
                yield Piece(name, p, masters.get(id(p), p), 0, 0, p.numel(), self._replica(p))
            elif self._zero < 3:
                mapping = p._hp_mapping
                if mapping is None:  # another rank has this parameter's masters
                    continue
                master = self.optimizer.param_groups[mapping.param_group_index]["params"][0]
                place = mapping.hp_fragment_address
                offset = mapping.lp_fragment_address.start
                yield Piece(name, p, master, place.start, offset, place.numel)
            else:
                group, start, numel = wrapper.grad_position[wrapper.get_param_id(p)]
                offset = dist.get_rank(p.ds_process_group) * numel
                # The last partitions end with padding.
                own = max(0, min(numel, p.ds_numel - offset))
                master = wrapper.fp32_partitioned_groups_flat[group]
                yield Piece(name, p, master, start, offset, own)

    def _replica(self, p: nn.Parameter) -> tuple[int, int]:
        """Return the index of this rank's copy of a parameter, and the number of copies."""
        if not _is_expert(p):
            return self.world.rank, self.world.size
        name: str = p.group_name  # type: ignore[attr-defined]
        rank: int = groups._get_expert_data_parallel_rank(name)
        size: int = groups._get_expert_data_parallel_world_size(name)
        return rank, size

    @torch.no_grad()
    def sync_weights(self) -> None:
        wrapper = self._optimizer
        if self._zero == 3:
            wrapper.checkpoint_event_prologue()
            for group in range(len(wrapper.fp16_groups)):
                wrapper._reassign_or_swap_out_partitioned_parameters(group)
            wrapper.checkpoint_event_epilogue()
        elif self._zero:
            wrapper.update_lp_params()
        elif not self._unwrapped:
            for weights, copies in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                for weight, copy in zip(weights, copies, strict=True):
                    weight.copy_(copy)

    @torch.no_grad()
    def _move_to_disk(self, offload: Offload) -> None:
        """Replace host tensors by mapped files, which every reader uses like ordinary tensors.

        DeepSpeed's own NVMe swapping compiles an op, and leaves no tensors to save."""
        wrapper = self._optimizer
        allocate = partial(on_disk, folder=str(offload.path))
        if offload.params == "nvme":
            for group, flat in enumerate(wrapper.fp16_partitioned_groups_flat):
                mapped = allocate(flat)
                wrapper.fp16_partitioned_groups_flat[group] = mapped
                wrapper._move_to_flat_buffer(wrapper.fp16_groups[group], mapped)
            wrapper.param_groups_fp16_flat_cpu_memory.clear()
        if offload.optimizer == "nvme":
            for master in wrapper.fp32_partitioned_groups_flat:
                master.data = allocate(master).copy_(master)
            fragments.create_moments(self.pieces(), self.optimizer, allocate)


def _is_expert(p: Tensor) -> bool:
    return hasattr(p, "group_name")


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm like torch's get_total_norm, but in fp32 also for bf16 gradients."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _deepspeed_config(config: RunConfig, world: World) -> dict[str, Any]:
    micro = config.train.micro_batch
    offload = {
        "offload_optimizer": config.parallel.offload.optimizer,
        "offload_param": config.parallel.offload.params,
    }
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": config.rows // micro // (world.size // config.parallel.sp),
        "gradient_clipping": config.optim.clip if config.parallel.zero else 0.0,
        "bf16": {"enabled": config.train.dtype == "bf16"},
        "zero_optimization": {
            "stage": config.parallel.zero,
            # Otherwise each block would be compiled again.
            "memory_efficient_linear": False,
            # Also for NVMe: `_move_to_disk` replaces the tensors in host memory.
            **{part: {"device": "cpu"} for part, place in offload.items() if place},
        },
        # torch's fused AdamW needs no compiled op, and has the same results on a CPU.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        # The timers wait for the device twice in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
