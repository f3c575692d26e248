"""Ranks that share sequences compute the same losses and gradients as one process with whole sequences."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.config.layers import load
from pipeline.errors import ConfigError
from pipeline.model.build import build_model, init_weights
from pipeline.parallel.sequence import share_sequences
from pipeline.planner.check import resolve
from tests import forks
from tests.conftest import environment

SMALL = "seq=32 vocab=64 width=32 layers=2 attention.heads=4"
HEADS = "attention.head_dim=8 ffn.hidden=48"
FEW = f"{HEADS} attention.kv_heads=1"
MLA = "attention.kv_rank=16 attention.nope_dim=8 attention.rope_dim=4 attention.v_dim=8"
EXPERTS = (
    "ffn.hidden=16 ffn.dense_hidden=24 ffn.experts=4 ffn.top_k=2 ffn.aux_loss=0.1 ffn.z_loss=0.1"
)
RELATIVE = "position={kind='relative',buckets=8,max_distance=20}"
MODELS = {  # architecture, settings of the model
    "fewer key/value heads than ranks": ("dense", f"{FEW} mtp=2"),
    "learned positions, sinks": ("gpt3", f"{HEADS} attention.kv_heads=2 attention.sinks=true"),
    "ALiBi, windows, soft-cap": (
        "dense",
        f"{FEW} position={{kind='alibi'}} attention.window=12 attention.softcap=20.0",
    ),
    "relative positions": ("dense", f"{FEW} {RELATIVE}"),
    "switch, full experts drop": (
        "switch",
        f"{HEADS} {EXPERTS} attention.kv_heads=2 ffn.capacity=1.0",
    ),
    "smear across ranks": ("isoflop", f"{FEW} residual_scales=true mtp=1"),
    "balanced within sequences": ("mla-moe", f"{MLA} {EXPERTS} mtp=1 ffn.seq_aux_loss=0.1"),
}


def config(arch, settings):
    sets = [f"model.{setting}" for setting in f"{SMALL} {settings}".split()]
    return load(size="tiny", arch=arch, sets=[*sets, "optim.z_loss=0.01"])


def rows(cfg, seed):
    """Two packed rows with documents, and positions without a target, more of them at the end."""
    seq = cfg.model.seq
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(cfg.model.vocab, (2, seq + 1), generator=generator)
    documents = (tokens[:, :-1] < 6).cumsum(1)
    targets = tokens[:, 1:].clone()
    ignored = torch.rand(targets.shape, generator=generator) < torch.linspace(0, 0.6, seq)
    targets[ignored] = -100
    return tokens[:, :-1], targets, documents


def train(cfg, batches, sp=None):
    """Return loss, dropped share and gradients; and the experts' load.

    Of one process over all batches, or of this rank over its own.
    """
    model = build_model(cfg.model, z_loss=cfg.optim.z_loss, loss_chunk=16)
    init_weights(model, cfg.model, 1)
    with torch.no_grad():
        for p in model.parameters():  # values of zero would hide a mistake
            if not p.any():
                p.normal_(0, 0.2, generator=torch.Generator().manual_seed(2))
    if sp:
        share_sequences(model, sp)
    losses = [model(*batch) for batch in batches]
    sum(each.total for each in losses).backward()
    routed = [each.routing for each in losses if each.routing is not None]
    values = {name: p.grad for name, p in model.named_parameters()}
    values["nll"] = sum(each.nll for each in losses).detach()
    values["dropped"] = sum((each.dropped for each in routed), torch.zeros(1))
    return values, sum((each.load_E for each in routed), torch.zeros(1))


def compare(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    for name, (arch, settings) in MODELS.items():
        cfg = config(arch, settings)
        for sp in (2, 4):
            wanted, load = train(cfg, [rows(cfg, reader) for reader in range(4 // sp)])
            found, own = train(cfg, [rows(cfg, rank // sp)], sp)
            for tensor in (own, *found.values()):
                dist.all_reduce(tensor)
            assert torch.equal(own, load), (name, sp)
            assert (wanted["dropped"].sum() > 0.1) == ("drop" in name)
            for key, want in wanted.items():
                off = (found[key] / sp - want).abs().max()
                assert off <= 1e-5 * want.abs().max(), (name, sp, key, off)
    dist.destroy_process_group()


def test_shared_sequences_give_the_losses_and_gradients_of_whole_ones(tmp_path):
    done = forks.run(__name__, [tmp_path / "store"], environment())
    assert done.returncode == 0, done.stderr


def test_an_impossible_degree_is_refused_with_the_nearest_possible():
    wrong = load(size="tiny", sets=["parallel.sp=8", "model.attention.heads=4"])
    with pytest.raises(ConfigError, match=r"sp=8.*parallel\.sp=4"):
        resolve(wrong, ranks=8, gpu=False)


if __name__ == "__main__":
    mp.start_processes(compare, (sys.argv[1],), nprocs=4, start_method="fork")
