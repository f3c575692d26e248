"""Published runs in our configuration format, and the predicted ladder: the rows of docs/SCALE.md.

Tokens per second and GPU are compared, since FLOP conventions differ. docs/SCALE.md names the source of each figure.
`python -m tests.published` prints the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.config.layers import load
from pipeline.config.schema import RunConfig
from pipeline.planner.check import resolve
from pipeline.planner.memory import Layout
from pipeline.planner.speed import Estimate, best, estimate, plan


@dataclass(frozen=True)
class Run:
    name: str
    source: str
    size: str
    arch: str
    cluster: str
    gpus: int
    rows: int  # sequences in a batch
    published: float  # tokens per second and GPU
    vocab: int
    seq: int
    layout: Layout | None = (
        None  # None: we have no such layout, and our best one is compared with it
    )
    sets: tuple[str, ...] = field(default=())

    def config(self) -> RunConfig:
        sets = [
            "recipe=adamw",
            f"model.vocab={self.vocab}",
            f"model.seq={self.seq}",
            f"train.batch_tokens={self.rows * self.seq}",
        ]
        sets += ["train.steps=1", *self.sets]
        return resolve(
            load(size=self.size, arch=self.arch, cluster=self.cluster, sets=sets),
            ranks=self.gpus,
            gpu=True,
        )

    def predict(self) -> Estimate:
        config = self.config()
        return estimate(config, self.layout) if self.layout else best(plan(config, self.gpus))

    def row(self) -> str:
        e = self.predict()
        predicted, at = e.tokens_s / self.gpus, e.layout
        words = f"ZeRO-{at.zero}" + (f", ep {at.ep}" if at.ep > 1 else "")
        words += f", micro-batch {at.micro_batch}" + (", recomputed" if at.recompute else "")
        error = predicted / self.published - 1
        return (
            f"| {self.name} | {self.source} | {self.gpus} × {self.cluster} | {words} | {self.published:,.0f} | "
            f"{predicted:,.0f} | {error:+.0%} |"
        )


LADDER = [  # size, arch, GPUs, seq, vocabulary
    ("1b", "dense", 8, 2048, 32768),
    ("7b", "llama3", 64, 8192, 128256),
    ("70b", "llama3", 512, 8192, 128256),
    ("16b", "deepseek-v2-lite", 64, 4096, 102400),
    ("236b", "deepseek-v2", 512, 4096, 102400),
    ("671b", "deepseek-v3", 2048, 4096, 129280),
]


def ladder_rows() -> Iterator[str]:
    """Yield the best ep, micro-batch and recomputation of each ZeRO stage on H100; the recommended stage is bold."""
    for size, arch, gpus, seq, vocab in LADDER:
        sets = ["recipe=adamw", f"model.seq={seq}", f"model.vocab={vocab}"]
        rows = plan(
            resolve(load(size=size, arch=arch, cluster="h100", sets=sets), ranks=gpus, gpu=True),
            gpus,
        )
        take = best(rows)
        for zero in range(4):
            e = best([row for row in rows if row.layout.zero == zero])
            stage = f"**{zero}**" if e is take else str(zero)
            again = {False: "no", True: "yes"}.get(e.layout.recompute, "selective")
            at = f"{stage} | {e.layout.ep} | {e.layout.micro_batch} | {again}"
            held = f"{e.memory.total / 2**30:,.1f} {'✓' if e.fits else '✗'} | {e.traffic.total / 2**30:,.0f}"
            time = f"{e.step_s:,.3g} | {e.tokens_s / gpus:,.0f} | {e.mfu:.0%} | {e.gpu_hours:,.0f}"
            yield f"| {size} {arch} × {gpus} | {at} | {held} | {time} |"


def _shape(
    layers: int, width: int, heads: int, kv_heads: int, hidden: int, head_dim: int = 128
) -> tuple[str, ...]:
    attention = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    sets = [f"model.layers={layers}", f"model.width={width}", f"model.ffn.hidden={hidden}"]
    return (*sets, *(f"model.attention.{key}={value}" for key, value in attention.items()))


MPT70 = _shape(80, 8192, 64, 64, 32768)
LLAMA405 = _shape(126, 16384, 128, 8, 53248)
QWEN30 = _shape(48, 2048, 32, 4, 768)
H800 = "cluster.rates.intra_bytes_s=160e9"  # NVLink of 200 GB/s each way


def _mpt(size, cluster, layout, rows, published, seq=2048, sets=()) -> Run:
    name = f"MPT {size}, seq {seq:,}"
    about = (name, "llm-foundry", size, "gpt3", cluster, layout.ranks)
    return Run(*about, rows, published, 50368, seq, layout, sets)


def _llama(name, source, size, cluster, layout, rows, published, vocab, seq, sets=()) -> Run:
    about = (name, source, size, "llama3", cluster, layout.ranks)
    return Run(*about, rows, published, vocab, seq, layout, sets)


def _megatron(size, source, layers, width, heads, ranks, speed) -> Run:
    sets = _shape(layers, width, heads, heads, 4 * width, width // heads)
    about = (f"GPT {size}", source, "1b", "gpt3", "a100", ranks)
    return Run(*about, ranks, speed, 51200, 2048, Layout(ranks, 3, 1, 1, True), sets)


# Data-parallel only, bf16: the planner predicts the same layout. (ranks, zero, ep, micro-batch, recompute)
SAME = [
    _mpt("1.3b", "h100", Layout(8, 3, 1, 14), 112, 45456),
    _mpt("1.3b", "h100", Layout(512, 2, 1, 12), 6144, 39838),
    _mpt("6.7b", "h100", Layout(8, 3, 1, 6), 48, 10643),
    _mpt("6.7b", "h100", Layout(512, 3, 1, 6), 3072, 9671),
    _mpt("6.7b", "h100", Layout(8, 3, 1, 1, True), 16, 1957, 65536),
    _mpt("13b", "h100", Layout(8, 3, 1, 2), 16, 4792),
    _mpt("13b", "h100", Layout(512, 3, 1, 16, True), 8192, 4953),
    _mpt("70b", "h100", Layout(128, 3, 1, 8, True), 1024, 1059, sets=MPT70),
    _mpt("70b", "h100", Layout(32, 3, 1, 2, True), 1024, 883, sets=MPT70),
    _mpt("1.3b", "a100", Layout(8, 3, 1, 18), 576, 22112, 1024),
    _mpt("13b", "a100", Layout(8, 3, 1, 2), 48, 2262),
    _mpt("70b", "a100", Layout(64, 3, 1, 8, True), 2048, 411, sets=MPT70),
    _llama("Llama-2 7B", "fms-fsdp", "6.7b", "a100", Layout(128, 3, 1, 2), 256, 3760, 32000, 4096),
    _llama("Llama-2 13B", "torchtitan", "13b", "a100", Layout(64, 3, 1, 2), 128, 2162, 32000, 4096),
    _llama("Llama-2 70B", "torchtitan", "70b", "a100", Layout(64, 3, 1, 2, True), 128, 353, 32000, 4096),
    _llama("Llama-3 8B, at 500 W", "torchtitan", "7b", "h100", Layout(128, 3, 1, 2), 256, 6514, 128256, 8192),
    Run("1b", "our LOG", "1b", "dense", "h200", 1, 128, 81025, 32768, 2048, Layout(1, 1, 1, 8)),
]  # fmt: skip

# Layouts, kernels or precisions that we do not have: the prediction is for our best layout on the same GPUs.
OTHER = [
    _megatron("530B", "Megatron 2022", 105, 20480, 128, 280, 2048 / 49.05),
    _megatron("1T", "Megatron 2022", 128, 25600, 160, 512, 2048 / 94.42),
    # 502 PFLOP/s, the recomputed forward counted: 96·layers·width²·(1 + seq/6width + vocab/(16·layers·width)) a token
    _megatron("1T", "Megatron 2021", 128, 25600, 160, 3072, 502e15 / 3072 / 8.168e12),
    # 430 TFLOP/s a GPU over the FLOPs of a token by account
    Run("Llama-3 405B", "Llama 3", "70b", "llama3", "h100", 8192, 8192, 430 / 2.524, 128256, 8192, None, LLAMA405),
    Run("Qwen3-30B-A3B", "Megatron-Bridge", "1b", "qwen3-moe", "h100", 16, 1024, 13011, 151936, 4096, None, QWEN30),
    Run("DeepSeek 16B", "torchtitan", "16b", "deepseek-v2-lite", "h100", 8, 32, 11758, 102400, 4096),
    Run("DeepSeek-V3", "Megatron-Bridge", "671b", "deepseek-v3", "h100", 1024, 8192, 1297, 129280, 4096),
    Run("DeepSeek-V3", "DeepSeek-V3", "671b", "deepseek-v3", "h100", 2048, 16384, 1543, 129280, 4096, None, (H800,)),
]  # fmt: skip

if __name__ == "__main__":
    print("\n".join([*ladder_rows(), *(run.row() for run in SAME + OTHER)]))
