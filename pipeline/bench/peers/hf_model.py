"""Hugging Face's model of the same shape, trained as their examples do it: what our step is held against."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, __version__

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.hub.families import choose_family, to_hub_config
from pipeline.parallel.engine import Micro
from pipeline.parallel.world import World


class HuggingFace:
    """Weights in the run's dtype with no master copy, SDPA, fused AdamW, compiled where ours is. `mixed`: weights in
    fp32 and bf16 by autocast, as their Trainer does it with bf16=True; it then keeps what ours keeps."""

    name, about = "HF", f"transformers {__version__}"

    def __init__(self, config: RunConfig, world: World, *, mixed: bool = False) -> None:
        cfg, lr = config.optim.optimizer, config.optim.lr
        assert lr != "auto" and cfg.beta2 != "auto", "resolve the recipe first"
        bf16 = config.train.dtype == "bf16"
        dtype = torch.bfloat16 if bf16 and not mixed else torch.float32
        self._cast = torch.autocast(world.device.type, torch.bfloat16, enabled=bf16 and mixed)
        table = described(config)
        with world.device:
            self.model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(table.pop("model_type"), **table, use_cache=False),
                dtype=dtype,
                attn_implementation="sdpa",
            )
        self._forward = torch.compile(self.model) if config.train.compile is True else self.model
        self._clip, weights = config.optim.clip, self.model.train().parameters()
        self._optimizer = torch.optim.AdamW(
            weights,
            lr=lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=cfg.eps,
            weight_decay=cfg.decay,
            fused=True,
        )

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor:
        """Its mean loss, still on the device."""
        total = torch.zeros((), device=micros[0].tokens_BS.device)
        for micro in micros:
            with self._cast:
                loss = self._forward(
                    input_ids=micro.tokens_BS, labels=micro.tokens_BS
                ).loss  # it shifts them itself
            (loss / len(micros)).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / len(micros)


def described(config: RunConfig) -> dict[str, object]:
    """config.json of the counterpart; refused where there is none."""
    if config.model.mtp:
        raise ConfigError(
            f"model.mtp={config.model.mtp} is not trained by transformers' models; --set model.mtp=0"
        )
    return to_hub_config(config.model, choose_family(config.model))
