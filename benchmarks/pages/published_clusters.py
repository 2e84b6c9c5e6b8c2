"""Training runs on many GPUs that others published. tigon measured none of them.

The rows were chosen, and what their sources leave open was assumed, before any of them was predicted. The rows of
DeepSpeed's ZeRO-3 were added when the others had been predicted, and committed before they were predicted themselves.
Each assumption of ours stands in `assumed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tigon.models.loading.presets import PRESETS
from tigon.planner.cluster.compute import UNFUSED, Workload
from tigon.planner.cluster.division import Division
from tigon.planner.cluster.shape import ModelShape
from tigon.planner.cluster.topology import Cluster, link_bytes_s
from tigon.planner.gpus import GIB, GPUS, Gpu

Metric = Literal["tokens/s per GPU", "seconds per step"]


@dataclass(frozen=True)
class Source:
    """A publication, and the place of a figure in it."""

    name: str
    title: str
    place: str
    """Table or section."""
    url: str


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One run: its set-up, and what was measured."""

    name: str
    source: Source
    work: Workload
    division: Division
    cluster: Cluster
    metric: Metric
    value: float
    memory_gib: float | None = None
    """The published peak of memory per GPU; None if the source does not give one."""
    assumed: tuple[str, ...] = field(default_factory=tuple)
    """Our assumptions about things that the source leaves open."""


TITAN = Source(
    "torchtitan, 2024-12", "torchtitan performance benchmarks, December 2024", "tables 1, 3, 4 and 5",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
)  # fmt: skip
TRAINY = Source(
    "torchtitan, 2025-06", "torchtitan on WhiteFiber's H200s, by Trainy, June 2025", "section Results",
    "https://github.com/pytorch/torchtitan/blob/main/benchmarks/"
    "llama3_8b_h200_2025-06_torchtitan_trainy_whitefiber.md",
)  # fmt: skip
MEGATRON = Source(
    "Megatron-LM, 2021", "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", "table 1",
    "https://arxiv.org/abs/2104.04473",
)  # fmt: skip
ZERO_3 = Source(
    "DeepSpeed ZeRO-3", "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", "table 2",
    "https://arxiv.org/abs/2104.04473",
)  # fmt: skip
RECOMPUTATION = Source(
    "Megatron-LM, 2022", "Reducing Activation Recomputation in Large Transformer Models", "tables 3 and 5",
    "https://arxiv.org/abs/2205.05198",
)  # fmt: skip
MT_NLG = Source(
    "DeepSpeed and Megatron", "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B", "section 2.4",
    "https://arxiv.org/abs/2201.11990",
)  # fmt: skip
LLAMA3 = Source("Llama 3 report", "The Llama 3 Herd of Models", "table 4", "https://arxiv.org/abs/2407.21783")
MOSAIC = Source(
    "MosaicML", "llm-foundry: MPT training benchmarks", "tables of H100 80GB BF16, A100 80GB and A100 40GB",
    "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
)  # fmt: skip
SOURCES = (TITAN, TRAINY, MEGATRON, RECOMPUTATION, MT_NLG, ZERO_3, LLAMA3, MOSAIC)


# --- models ----------------------------------------------------------------------------------------------------------


def llama(preset: str) -> ModelShape:
    """The shape of a Llama preset, without building the model."""
    config = PRESETS[preset]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return ModelShape(
        name=preset, layers=config["num_hidden_layers"], hidden=hidden, ffn=config["intermediate_size"],
        query_heads=heads, kv_heads=config["num_key_value_heads"], head_width=hidden // heads,
        vocab=config["vocab_size"], other_layer_numel=2 * hidden, other_numel=hidden,
    )  # fmt: skip


def gpt(name: str, *, layers: int, hidden: int, heads: int, vocab: int = 51200, dropout: bool = True) -> ModelShape:
    """A GPT: an MLP of four times the width without a gate, and a tied head."""
    return ModelShape(
        name=name, layers=layers, hidden=hidden, ffn=4 * hidden, query_heads=heads, kv_heads=heads,
        head_width=hidden // heads, vocab=vocab, gated=False, tied=True, dropout=dropout,
        other_numel=2048 * hidden, other_layer_numel=13 * hidden,
    )  # fmt: skip


# --- clusters --------------------------------------------------------------------------------------------------------

HBM2E_H100 = replace(
    GPUS["h100"], name="H100 with HBM2e", memory_bytes=95 * GIB,
    copy_bytes_s=GPUS["h100"].copy_bytes_s * 2.4 / 3.35,
)  # fmt: skip
"""torchtitan's GPU: 96 GB and 2.4 TB/s. Its limit of 500 W is not in the model."""


def on(gpu: Gpu, gpus: int, link: str) -> Cluster:
    """GPUs in nodes of eight."""
    return Cluster(gpu=gpu, gpus_per_node=8, nodes=gpus // 8, link_bytes_s=link_bytes_s(link))


# --- torchtitan ------------------------------------------------------------------------------------------------------


def _titan_8b(name: str, gpus: int, value: float, memory_gib: float, **changes: object) -> PublishedRun:
    work = Workload(
        shape=llama("llama-3.1-8b"), seq=8192, samples=2 * gpus, fused_loss=False, reduce_itemsize=4, **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    division = Division(sharding="weights", data=gpus, checkpointing="ops", micro_batch=2)
    compiled = ("Compiled layers move as much memory as tigon's fused ones.",) if "kernels" not in changes else ()
    return PublishedRun(
        name=f"Llama 3.1 8B, {gpus} GPUs, {name}", source=TITAN, work=work, division=division,
        cluster=on(HBM2E_H100, gpus, "400Gb"), metric="tokens/s per GPU", value=value, memory_gib=memory_gib,
        assumed=("8,192 tokens per sample.", "Gradients are reduced in fp32.", *compiled),
    )  # fmt: skip


def _titan_405b(schedule: str, chunks: int, value: float, memory_gib: float) -> PublishedRun:
    return PublishedRun(
        name=f"Llama 3.1 405B, 512 GPUs, FSDP 8, TP 8, PP 8, compile, Float8, {schedule}", source=TITAN,
        work=Workload(
            shape=llama("llama-3.1-405b"), seq=8192, samples=256, fp8=True, fused_loss=False, reduce_itemsize=4
        ),
        division=Division(
            sharding="weights", data=8, tensor=8, pipeline=8, chunks=chunks, checkpointing="full", accumulate=32
        ),
        cluster=on(HBM2E_H100, 512, "400Gb"), metric="tokens/s per GPU", value=value, memory_gib=memory_gib,
        assumed=(
            "8,192 tokens per sample.", "Micro-batches of one sample.", "Gradients are reduced in fp32.",
            "AsyncTP hides nothing.", *((f"Interleaved: {chunks} groups of layers per stage.",) if chunks > 1 else ()),
        ),
    )  # fmt: skip


_TORCHTITAN = (
    _titan_8b("FSDP", 8, 5762, 82.4, kernels=UNFUSED),
    _titan_8b("FSDP, compile", 8, 6667, 77.0),
    _titan_8b("FSDP, compile, Float8", 8, 8532, 76.8, fp8=True),
    _titan_8b("FSDP", 128, 5605, 67.0, kernels=UNFUSED),
    _titan_8b("FSDP, compile", 128, 6514, 62.0),
    _titan_8b("FSDP, compile, Float8", 128, 8380, 61.8, fp8=True),
    PublishedRun(
        name="Llama 3.1 70B, 256 GPUs, FSDP 32, TP 8, compile, Float8", source=TITAN,
        work=Workload(
            shape=llama("llama-3.1-70b"), seq=8192, samples=512, fp8=True, fused_loss=False, reduce_itemsize=4
        ),
        division=Division(sharding="weights", data=32, tensor=8, checkpointing="full", micro_batch=16),
        cluster=on(HBM2E_H100, 256, "400Gb"), metric="tokens/s per GPU", value=829, memory_gib=71.9,
        assumed=("8,192 tokens per sample.", "Gradients are reduced in fp32."),
    ),
    _titan_405b("1F1B", 1, 100, 82.5),
    _titan_405b("interleaved 1F1B", 2, 128, 72.7),
)  # fmt: skip


def _trainy(nodes: int, value: float, memory_gib: float) -> PublishedRun:
    gpus = 8 * nodes
    return PublishedRun(
        name=f"Llama 3.1 8B, {gpus} H200, FSDP, compile, Float8", source=TRAINY,
        work=Workload(
            shape=llama("llama-3.1-8b"), seq=8192, samples=2 * gpus, fp8=True, fused_loss=False, gather_itemsize=1,
            reduce_itemsize=4,
        ),
        division=Division(sharding="weights", data=gpus, checkpointing="ops", micro_batch=2),
        cluster=on(GPUS["h200"], gpus, "400Gb"), metric="tokens/s per GPU", value=value, memory_gib=memory_gib,
        assumed=("8,192 tokens per sample.", "Selective checkpointing by ops, the configuration's default."),
    )  # fmt: skip


_H200 = (_trainy(4, 10938, 47.96), _trainy(8, 10753, 46.97))


# --- Megatron-LM -----------------------------------------------------------------------------------------------------

_A100 = GPUS["a100-80gb"]
_SELENE = "200Gb"
"""Selene's nodes have eight HDR links of 200 Gb/s for eight GPUs (arXiv 2104.04473, section 5)."""


def _paper_flops(shape: ModelShape, samples: int, seq: int) -> float:
    """FLOPs of a step as arXiv 2104.04473 counts them, with one repeated forward pass (section 5.1)."""
    sizes = 1 + seq / (6 * shape.hidden) + shape.vocab / (16 * shape.layers * shape.hidden)
    return 96 * samples * seq * shape.layers * shape.hidden**2 * sizes


def _megatron(shape: ModelShape, *, gpus: int, tensor: int, pipeline: int, samples: int, tflops: float, chunks: int,
              micro_batch: int) -> PublishedRun:  # fmt: skip
    data = gpus // (tensor * pipeline)
    return PublishedRun(
        name=f"{shape.name}, {gpus} A100, TP {tensor}, PP {pipeline}", source=MEGATRON,
        work=Workload(shape=shape, seq=2048, samples=samples, flash=False, fused_loss=False, reduce_itemsize=4),
        division=Division(
            sharding="none", data=data, tensor=tensor, pipeline=pipeline, chunks=chunks, checkpointing="full",
            micro_batch=micro_batch, accumulate=samples // data // micro_batch,
        ),
        cluster=on(_A100, gpus, _SELENE), metric="seconds per step",
        value=_paper_flops(shape, samples, 2048) / (gpus * tflops * 1e12),
        assumed=(
            "The seconds follow from the table's TFLOP/s per GPU and the paper's equation 3.",
            "Layers with fused operators, as tigon's.",
            *((f"Interleaved: {chunks} groups of layers per stage.",) if chunks > 1 else ()),
            f"Micro-batches of {micro_batch} sample{'s' if micro_batch > 1 else ''}.",
        ),
    )  # fmt: skip


_MEGATRON = (
    _megatron(gpt("GPT 18.4B", layers=40, hidden=6144, heads=48), gpus=256, tensor=8, pipeline=1, samples=1024,
              tflops=135, chunks=1, micro_batch=4),
    _megatron(gpt("GPT 145.6B", layers=80, hidden=12288, heads=96), gpus=1536, tensor=8, pipeline=8, samples=2304,
              tflops=148, chunks=2, micro_batch=2),
    _megatron(gpt("GPT 1008B", layers=128, hidden=25600, heads=160), gpus=3072, tensor=8, pipeline=64, samples=3072,
              tflops=163, chunks=2, micro_batch=1),
)  # fmt: skip


def _recomputation(shape: ModelShape, *, pipeline: int, chunks: int, samples: int, micro_batch: int,
                   seconds: Mapping[str, float]) -> tuple[PublishedRun, ...]:  # fmt: skip
    gpus = 8 * pipeline
    words = {"full": "full recomputation", "core": "selective recomputation"}
    return tuple(
        PublishedRun(
            name=f"{shape.name}, {gpus} A100, TP 8, PP {pipeline}, {words[checkpointing]}", source=RECOMPUTATION,
            work=Workload(shape=shape, seq=2048, samples=samples, flash=False, fused_loss=False, reduce_itemsize=4),
            division=Division(
                sharding="none", data=1, tensor=8, pipeline=pipeline, chunks=chunks, checkpointing=checkpointing,
                micro_batch=micro_batch, accumulate=samples // micro_batch,
            ),
            cluster=on(_A100, gpus, _SELENE), metric="seconds per step", value=value,
            assumed=("Layers with fused operators, as tigon's.", "200 Gb/s per GPU between nodes, as on Selene."),
        )
        for checkpointing, value in seconds.items()
    )  # fmt: skip


_RECOMPUTATION = (
    *_recomputation(gpt("GPT 22B", layers=48, hidden=6144, heads=64), pipeline=1, chunks=1, samples=4, micro_batch=4,
                    seconds={"full": 1.42, "core": 1.10}),
    *_recomputation(gpt("GPT 175B", layers=96, hidden=12288, heads=96), pipeline=8, chunks=3, samples=64,
                    micro_batch=1, seconds={"full": 18.13, "core": 13.75}),
    *_recomputation(gpt("GPT 530B", layers=105, hidden=20480, heads=128), pipeline=35, chunks=3, samples=280,
                    micro_batch=1, seconds={"full": 49.05, "core": 37.83}),
    *_recomputation(gpt("GPT 1T", layers=128, hidden=25600, heads=160), pipeline=64, chunks=1, samples=512,
                    micro_batch=1, seconds={"full": 94.42, "core": 71.49}),
)  # fmt: skip


# --- DeepSpeed and Megatron ------------------------------------------------------------------------------------------


def _mt_nlg(nodes: int, seconds: float) -> PublishedRun:
    data = nodes // 35
    return PublishedRun(
        name=f"MT-NLG 530B, {8 * nodes} A100, TP 8, PP 35", source=MT_NLG,
        work=Workload(
            shape=gpt("MT-NLG 530B", layers=105, hidden=20480, heads=128), seq=2048, samples=1920, flash=False,
            fused_loss=False, reduce_itemsize=4,
        ),
        division=Division(
            sharding="none", data=data, tensor=8, pipeline=35, checkpointing="full", accumulate=1920 // data
        ),
        cluster=on(_A100, 8 * nodes, _SELENE), metric="seconds per step", value=seconds,
        assumed=(
            "Micro-batches of one sample.", "1F1B without interleaving.", "Full recomputation.",
            "Layers with fused operators, as tigon's.",
        ),
    )  # fmt: skip


_MT_NLG = (_mt_nlg(280, 60.1), _mt_nlg(350, 50.2), _mt_nlg(420, 44.4))


# --- DeepSpeed's ZeRO-3, as Megatron-LM's authors measured it ---------------------------------------------------------


def _zero_3(shape: ModelShape, gpus: int, micro_batch: int, tflops: float) -> PublishedRun:
    samples = gpus * micro_batch
    return PublishedRun(
        name=f"{shape.name}, {gpus} A100, ZeRO-3", source=ZERO_3,
        work=Workload(shape=shape, seq=2048, samples=samples, flash=False, fused_loss=False, reduce_itemsize=2),
        division=Division(
            sharding="weights", engine="DeepSpeed", whole_layers=False, data=gpus, checkpointing="full",
            micro_batch=micro_batch,
        ),
        cluster=on(_A100, gpus, _SELENE), metric="seconds per step",
        value=_paper_flops(shape, samples, 2048) / (gpus * tflops * 1e12),
        assumed=(
            "The seconds follow from the table's TFLOP/s per GPU and the paper's equation 3.",
            "Layers with fused operators, as tigon's.", "Full recomputation.",
        ),
    )  # fmt: skip


_GPT_175B = gpt("GPT 175B", layers=96, hidden=12288, heads=96)
_GPT_530B = gpt("GPT 530B", layers=105, hidden=20480, heads=128)
_ZERO_3 = (
    _zero_3(_GPT_175B, 384, 4, 144), _zero_3(_GPT_175B, 768, 2, 88), _zero_3(_GPT_175B, 1536, 1, 44),
    _zero_3(_GPT_530B, 640, 4, 138), _zero_3(_GPT_530B, 1120, 2, 98), _zero_3(_GPT_530B, 2240, 1, 48),
)  # fmt: skip


# --- Llama 3 ---------------------------------------------------------------------------------------------------------


def _llama3(*, gpus: int, sequence: int, data: int, seq: int, per_replica: int, tflops: float) -> PublishedRun:
    shape = llama("llama-3.1-405b")
    samples = data * per_replica
    attention = shape.layers * 6 * shape.attention_width * seq
    flops = samples * seq * (6 * shape.numel + attention)
    return PublishedRun(
        name=f"Llama 3 405B, {gpus:,} H100, TP 8, CP {sequence}, PP 16, DP {data}, {seq:,} tokens", source=LLAMA3,
        work=Workload(shape=shape, seq=seq, samples=samples, fused_loss=False, reduce_itemsize=4),
        division=Division(
            sharding="optimizer", data=data, tensor=8, sequence=sequence, pipeline=16, chunks=4, accumulate=per_replica
        ),
        cluster=on(GPUS["h100"], gpus, "400Gb"), metric="seconds per step", value=flops / (gpus * tflops * 1e12),
        assumed=(
            "The seconds follow from the table's TFLOP/s per GPU, 6 FLOPs per parameter and token, and half of "
            "attention's products.",
            "Interleaved: 4 groups of layers per stage.", "No activation checkpointing.",
            "Micro-batches of one sample.",
            *(("Context parallelism costs as much as all-to-alls of the heads.",) if sequence > 1 else ()),
        ),
    )  # fmt: skip


_LLAMA3 = (
    _llama3(gpus=8192, sequence=1, data=64, seq=8192, per_replica=32, tflops=430),
    _llama3(gpus=16384, sequence=1, data=128, seq=8192, per_replica=16, tflops=400),
    _llama3(gpus=16384, sequence=16, data=8, seq=131072, per_replica=16, tflops=380),
)


# --- MosaicML --------------------------------------------------------------------------------------------------------

_MPT = {
    "7B": {"layers": 32, "hidden": 4096, "heads": 32},
    "13B": {"layers": 40, "hidden": 5120, "heads": 40},
    "30B": {"layers": 48, "hidden": 7168, "heads": 56},
    "70B": {"layers": 80, "hidden": 8192, "heads": 64},
}


def _mpt(size: str, gpu: str, gpus: int, *, micro_batch: int, accumulate: int, checkpointing: str, value: float,
         states: str = "amp-bf16") -> PublishedRun:  # fmt: skip
    h100 = gpu == "h100"
    work = Workload(
        shape=gpt(f"MPT {size}", **_MPT[size], vocab=50368, dropout=False), seq=2048,
        samples=micro_batch * accumulate * gpus, states=states, kernels=UNFUSED, fused_loss=False, reduce_itemsize=2,
        reduces_each=True,
    )  # fmt: skip
    division = Division(
        sharding="weights", data=gpus, checkpointing=checkpointing, micro_batch=micro_batch, accumulate=accumulate
    )
    link = ("400 Gb/s per GPU between nodes.",) if h100 and gpus > 8 else ()
    return PublishedRun(
        name=f"MPT {size}, {gpus} {gpu.upper()}, FSDP", source=MOSAIC, work=work, division=division,
        cluster=on(GPUS[gpu], gpus, "400Gb" if h100 else "200Gb"), metric="tokens/s per GPU", value=value,
        assumed=(
            "Layers without fused kernels beside attention.", "Gradients are reduced in 16 bits in each micro-batch.",
            *link,
        ),
    )  # fmt: skip


_MOSAIC = (
    _mpt("70B", "h100", 64, micro_batch=8, accumulate=4, checkpointing="full", value=1039),
    _mpt("70B", "h100", 32, micro_batch=2, accumulate=16, checkpointing="full", value=882),
    _mpt("30B", "h100", 8, micro_batch=3, accumulate=21, checkpointing="full", value=2002),
    _mpt("13B", "h100", 64, micro_batch=2, accumulate=1, checkpointing="none", value=4800),
    _mpt("7B", "h100", 8, micro_batch=6, accumulate=1, checkpointing="none", value=10643),
    _mpt("70B", "a100-80gb", 64, micro_batch=8, accumulate=4, checkpointing="full", value=410, states="bf16"),
    _mpt("70B", "a100-80gb", 32, micro_batch=2, accumulate=16, checkpointing="full", value=373, states="bf16"),
    _mpt("7B", "a100-80gb", 8, micro_batch=6, accumulate=2, checkpointing="none", value=4641),
    _mpt("70B", "a100-40gb", 128, micro_batch=4, accumulate=1, checkpointing="full", value=376, states="bf16"),
)

RUNS: tuple[PublishedRun, ...] = (
    *_TORCHTITAN, *_H200, *_MEGATRON, *_RECOMPUTATION, *_MT_NLG, *_ZERO_3, *_LLAMA3, *_MOSAIC,
)  # fmt: skip
