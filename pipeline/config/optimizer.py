"""How weights are updated: the optimizers and the schedules of the learning rate.

Each `...Spec` class allows "auto"; the class that inherits from it does not.
"""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.parts import Auto, Count, Frozen, Rate, Share, Weight


class AdamWSpec(Frozen):
    kind: Literal["adamw"] = "adamw"
    beta1: Share = 0.9
    beta2: Share | Auto = "auto"
    eps: Rate = 1e-8
    decay: Weight = 0.1


class AdamW(AdamWSpec):
    beta2: Share


class MuonSpec(Frozen):
    """Orthogonalized momentum for the matrices of the blocks, AdamW for everything else.

    `optim.lr` is the rate of the matrices. The other rates are given as factors of it."""

    kind: Literal["muon"] = "muon"
    momentum: Share = 0.95
    normalize: bool = False  # equal variance of an update's rows: NorMuon (arXiv 2510.05491)
    decay: Weight | Auto = "auto"  # weight decay of the matrices; nothing else decays
    decay_with_rate: bool = False  # multiply the decay by rate / peak rate
    cautious: bool = False  # decay only weights that the update shrinks (arXiv 2510.12402)
    embedding_rate: Rate | Auto = "auto"
    head_rate: Rate | Auto = "auto"
    vector_rate: Rate | Auto = "auto"  # for norms, biases, routers and everything else
    # These three are for AdamW.
    beta1: Share | Auto = "auto"
    beta2: Share | Auto = "auto"
    eps: Rate = 1e-10


class Muon(MuonSpec):
    decay: Weight
    embedding_rate: Rate
    head_rate: Rate
    vector_rate: Rate
    beta1: Share
    beta2: Share


class WSDSpec(Frozen):
    """Warm up, stay at the peak, then decay as 1 − √x or 1 − x over the last share of the steps."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: Count | Auto = "auto"
    decay_share: Share = 0.2
    decay_shape: Literal["sqrt", "linear"] = "sqrt"
    final_share: Share = 0.0  # rate at the last step, relative to the peak


class WSD(WSDSpec):
    warmup_steps: Count


class CosineSpec(Frozen):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: Count | Auto = "auto"
    final_share: Share = 0.1


class Cosine(CosineSpec):
    warmup_steps: Count


class InverseSqrtSpec(Frozen):
    """Warm up, then decay as 1/√step, whatever the length of the run (arXiv 1706.03762, §5.3)."""

    kind: Literal["inverse-sqrt"] = "inverse-sqrt"
    warmup_steps: Count | Auto = "auto"


class InverseSqrt(InverseSqrtSpec):
    warmup_steps: Count


Optimizer = Annotated[AdamW | Muon, Field(discriminator="kind")]
Schedule = Annotated[WSD | Cosine | InverseSqrt, Field(discriminator="kind")]


class OptimSpec(Frozen):
    lr: Rate | Auto
    clip: Rate
    z_loss: Weight
    optimizer: Annotated[AdamWSpec | MuonSpec, Field(discriminator="kind")]
    schedule: Annotated[WSDSpec | CosineSpec | InverseSqrtSpec, Field(discriminator="kind")]


class Optim(OptimSpec):
    lr: Rate
    optimizer: Optimizer
    schedule: Schedule
