"""Ranks that share sequences compute the losses and gradients of one process that has them whole."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pipeline.config.layers import load
from pipeline.errors import ConfigError
from pipeline.model.build import build_model, init_weights
from pipeline.parallel.sequence import share_sequences
from pipeline.planner.check import resolve

SMALL = [
    "model.seq=32",
    "model.vocab=64",
    "model.width=32",
    "model.layers=2",
    "model.attention.heads=4",
]
HEADS = ["model.attention.head_dim=8", "model.ffn.hidden=48"]
FEW = [*HEADS, "model.attention.kv_heads=1"]
MLA = [f"model.attention.{key}" for key in ("kv_rank=16", "nope_dim=8", "rope_dim=4", "v_dim=8")]
EXPERTS = [
    f"model.ffn.{key}"
    for key in (
        "hidden=16",
        "dense_hidden=24",
        "experts=4",
        "top_k=2",
        "aux_loss=0.1",
        "z_loss=0.1",
    )
]

MODELS = {
    "dense, fewer key/value heads than ranks": (
        "dense",
        [*FEW, "model.mtp=2", "optim.z_loss=0.01"],
    ),
    "learned positions, sinks": (
        "gpt3",
        [*HEADS, "model.attention.kv_heads=2", "model.attention.sinks=true"],
    ),
    "ALiBi, windows, soft-cap": (
        "dense",
        [
            *FEW,
            "model.position={kind='alibi'}",
            "model.attention.window=12",
            "model.attention.softcap=20.0",
        ],
    ),
    "relative positions": (
        "dense",
        [*FEW, "model.position={kind='relative',buckets=8,max_distance=20}"],
    ),
    "switch, full experts drop": (
        "switch",
        [*HEADS, *EXPERTS, "model.attention.kv_heads=2", "model.ffn.capacity=1.0"],
    ),
    "mla-moe, balanced within sequences": (
        "mla-moe",
        [*MLA, *EXPERTS, "model.mtp=1", "model.ffn.seq_aux_loss=0.1"],
    ),
}


def config(arch, sets):
    return load(size="tiny", arch=arch, sets=[*SMALL, *sets])


def rows(cfg, seed):
    """Two packed rows: documents, and places that predict nothing, more of them in one part than in another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(cfg.model.vocab, (2, cfg.model.seq + 1), generator=generator)
    documents = (tokens[:, :-1] < 6).cumsum(1)
    targets = tokens[:, 1:].clone()
    targets[
        torch.rand(targets.shape, generator=generator) < torch.linspace(0, 0.6, cfg.model.seq)
    ] = -100
    return tokens[:, :-1], targets, documents


def trained(cfg, batches, sp=None):
    """Mean loss and gradients, of one process over all batches, or of this rank over its own."""
    model = build_model(cfg.model, z_loss=cfg.optim.z_loss, loss_chunk=16)
    init_weights(model, cfg.model, 1)
    if sp:
        share_sequences(model, sp)
    losses = [model(*batch) for batch in batches]
    sum(each.total for each in losses).backward()
    routed = [each.routing for each in losses if each.routing is not None]
    dropped, load = (
        sum((r.dropped for r in routed), torch.zeros(1)),
        sum((r.load_E for r in routed), torch.zeros(1)),
    )
    nll = sum(each.nll for each in losses).detach()
    return {
        "nll": nll,
        "dropped": dropped,
        **{name: p.grad for name, p in model.named_parameters()},
    }, load


def compare(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    for name, (arch, sets) in MODELS.items():
        cfg = config(arch, sets)
        for sp in (2, 4):
            readers = 4 // sp
            wanted, load = trained(cfg, [rows(cfg, reader) for reader in range(readers)])
            found, own = trained(cfg, [rows(cfg, rank // sp)], sp)
            for tensor in (own, *found.values()):
                dist.all_reduce(tensor)
            assert torch.equal(own, load), (name, sp)
            assert (wanted["dropped"].sum() > 0.1) == ("drop" in name)
            for key, want in wanted.items():
                off = (found[key] / sp - want).abs().max()
                assert off <= 1e-5 * want.abs().max(), (name, sp, key, off)
    dist.destroy_process_group()


def forked(_, store):
    """Four ranks for the price of one import."""
    torch.set_num_threads(1)  # threads do not survive it
    mp.start_processes(compare, (store,), nprocs=4, start_method="fork")


def test_shared_sequences_give_the_losses_and_gradients_of_whole_ones(tmp_path):
    mp.spawn(forked, (tmp_path / "store",), nprocs=1)


def test_what_cannot_be_shared_is_refused_with_the_nearest_that_can():
    with pytest.raises(
        ConfigError, match=r"sp=8 does not divide heads=4 and seq=2048; try --set parallel.sp=4"
    ):
        resolve(
            load(size="tiny", sets=["parallel.sp=8", "model.attention.heads=4"]), ranks=8, gpu=False
        )
