"""Other trainers of a model of the same shape, with which our step is compared."""

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, __version__

from pipeline.config.dump import changed
from pipeline.config.optimizer import AdamW, Muon
from pipeline.config.schema import RunConfig
from pipeline.config.shape import Model
from pipeline.errors import ConfigError
from pipeline.hub.families import Family, choose_family, to_hub_config
from pipeline.objective.batch import Micro
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.world import World
from pipeline.planner.count import params
from pipeline.planner.rates import adamw_peak


class Twin:
    """Our own engine without fp8, from the same weights."""

    about = "our engine without fp8"

    def __init__(self, config: RunConfig, world: World) -> None:
        self.name: str = config.train.dtype  # fp32 on a CPU, unless bf16 is set
        self._engine = build_engine(changed(config, {"train.fp8": False}), world)

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor:
        """Train on the micro-batches; return the mean loss, on the device."""
        return self._engine.update(micros, lr).nll


class HuggingFace:
    """Hugging Face's model as in their examples, compiled if ours is.

    The weights have the run's dtype and no masters; attention is SDPA, the optimizer fused AdamW,
    even if ours is Muon. With `mixed`, the weights are fp32 and autocast makes matmuls bf16, as in
    their Trainer with bf16=True. This needs as many bytes per parameter as our engine."""

    name = "HF"
    about = f"transformers {__version__}"

    def __init__(self, config: RunConfig, world: World, *, mixed: bool = False) -> None:
        adam = config.optim.optimizer
        self._rate = 1.0  # factor of our rate
        if isinstance(adam, Muon):  # its rate for matrices is too high for AdamW
            adam = AdamW(beta2=0.95)
            tokens = config.train.steps * config.train.batch_tokens
            peak = adamw_peak(config.model, params(config.model), tokens).value
            self._rate = peak / config.optim.lr
        bf16 = config.train.dtype == "bf16"
        architecture, table = describe(config)
        # Random weights have our init_std, so that the first losses nearly agree. transformers does
        # not scale by the inputs; with its usual 0.02 every logit is near 0.
        if config.model.init == "fan_in":
            table["initializer_range"] = 0.02
        # The usual special tokens of a family may lie beyond our vocabulary.
        none = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"])
        shape = AutoConfig.for_model(table.pop("model_type"), **{**none, **table}, use_cache=False)
        dtype = torch.bfloat16 if bf16 and not mixed else torch.float32
        with world.device:
            self._model = getattr(transformers, architecture)(shape).to(dtype).train()
        self._forward = torch.compile(self._model) if config.train.compile is True else self._model
        self._cast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16 and mixed)
        self._clip = config.optim.clip
        self._stack = config.model.stack
        # One group, in which every parameter decays; ours has several (optim/groups.py).
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.optim.lr * self._rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.decay,
            fused=True,
        )

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor:
        total = torch.zeros((), device=micros[0].tokens_BS.device)
        for micro in micros:
            with self._cast:
                loss = self._forward(**_arguments(micro, self._stack)).loss
            (loss / len(micros)).backward()
            # The sum stays on the device: reading it would make the host wait in every micro-batch.
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.param_groups[0]["lr"] = lr * self._rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / len(micros)


Peer = Twin | HuggingFace


def _arguments(micro: Micro, stack: str) -> dict[str, Tensor | None]:
    """Return the same batch by the names that transformers uses."""
    if stack == "decoder":  # the model shifts the labels itself
        return {"input_ids": micro.tokens_BS, "labels": micro.tokens_BS}
    if stack == "encoder-decoder":
        mask_BE = None
        if micro.source_documents_BE is not None and micro.documents_BS is not None:
            # Padding is a document that the decoder does not have.
            last_B1 = micro.documents_BS.amax(1, keepdim=True)
            mask_BE = micro.source_documents_BE <= last_B1
        return {
            "input_ids": micro.source_BE,
            "attention_mask": mask_BE,
            "decoder_input_ids": micro.tokens_BS,
            "labels": micro.targets_BS,
        }
    return {"input_ids": micro.tokens_BS, "labels": micro.targets_BS}


def describe(config: RunConfig) -> tuple[str, dict[str, object]]:
    """Return the class of the same shape and its config.json; raise ConfigError without one."""
    # transformers would build the model without the heads, and its step would look faster.
    if config.model.mtp:
        text = f"model.mtp={config.model.mtp}: transformers does not train such heads"
        raise ConfigError(f"{text}; --set model.mtp=0")
    if config.objective.kind not in ("causal", "masked", "spans", "denoise"):
        raise ConfigError(
            f"objective.kind={config.objective.kind!r}: the comparison with transformers covers "
            "causal, masked, spans and denoise"
        )
    # transformers would add the loss of the rows to that of the tokens.
    if config.model.row_classes:
        raise ConfigError(
            f"model.row_classes={config.model.row_classes}: losses of rows are not compared with "
            "transformers; --set objective.pairs=none --set model.row_classes=0"
        )
    family = hub_family(config.model)
    return family.architecture, to_hub_config(config.model, family)


def hub_family(cfg: Model) -> Family:
    """Return the family of the same shape; raise ConfigError if transformers has no class."""
    family = choose_family(cfg)
    if family.kind == "isoflop":  # its modeling file exists only in exported directories
        text = f"model.arch={cfg.arch}: transformers has no class for this model"
        raise ConfigError(f"{text}; compare another, such as --arch dense")
    return family
