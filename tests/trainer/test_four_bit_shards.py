"""Frozen weights in 4 bits under FSDP2, and adapters on experts in shards: two gloo processes against one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_technique_runs import cut_back, fsdp_rank, need, succeeds, zero_rank
from tiny_checkpoint import EXPERTS, chats, put_experts_into_mxfp4, save
from trainer_helpers import losses
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from forks import forks
from second_proofs import proved_by
from tigon.errors import RecipeError
from tigon.models.seams import experts as experts_seam
from tigon.models.seams import lora as lora_seam
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.four_bit_weights import let_fsdp_divide, packed_weights
from tigon.trainer import run as run_module
from tigon.trainer.guards.adapter_checks import check_quantized

pytest.importorskip("peft")
WIDE = {"hidden_size": 64, "intermediate_size": 64}  # bitsandbytes on a CPU needs rows of whole blocks of 64
QLORA = ("lora.rank=4", "lora.quantize=true")
ON_EXPERTS = "lora.targets=[linear, experts]"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoints(kind): a checkpoint, made once."""
    kinds: dict[str, dict[str, Any]] = {
        "dense": WIDE,
        "experts": {"model_type": "qwen3_moe", **EXPERTS, **WIDE, "moe_intermediate_size": 64},
        "mxfp4": {
            "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, **WIDE,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }  # fmt: skip
    store = tmp_path_factory.mktemp("checkpoints")

    def made(kind: str) -> Path:
        if kind == "stored in 4 bits" and not (store / kind).exists():
            whole = AutoModelForCausalLM.from_pretrained(
                made("dense"), quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            )
            whole.save_pretrained(store / kind)
            AutoTokenizer.from_pretrained(made("dense")).save_pretrained(store / kind)
        if not (store / kind).exists():
            save(store / kind, dtype=torch.float32 if kind != "mxfp4" else torch.bfloat16, **kinds[kind])
            if kind == "mxfp4":
                put_experts_into_mxfp4(store / kind)
        return store / kind

    return made


@pytest.fixture
def recipe_for(here: Path, checkpoints: Any) -> Callable[..., Path]:
    """Writes one.yaml, a run of four steps with four samples each that saves the merged model."""
    chats(here / "chats.jsonl")

    def write(kind: str, sets: Sequence[str] = (), kernels: str = "tigon", **train: Any) -> Path:
        mapping: dict[str, Any] = {
            "model": {"name": str(checkpoints(kind)), "kernels": kernels},
            "data": {"source": "chats.jsonl", "sequence_length": 64, "eval_fraction": 0.1},
            "train": {"steps": 4, "batch_size": 4, "learning_rate": 0.02, "log_steps": 1, "device": "cpu", **train},
            "output": {"name": "one", "sample_tokens": 0, "merge": True},
        }  # fmt: skip
        for key, value in (text.split("=", 1) for text in sets):
            section, name = key.split(".")
            mapping.setdefault(section, {})[name] = yaml.safe_load(value)
        (here / "one.yaml").write_text(yaml.safe_dump(mapping), encoding="utf-8")
        return here / "one.yaml"

    return write


def in_two(here: Path, recipe: Path, name: str, *sets: str, resume: bool = False) -> list[dict[str, Any]]:
    """Train in two processes with two samples each per step.

    Returns for each process the bytes of packed weights that it holds, those of all, and how often tigon's ops ran.
    """
    words = [f"output.name={name}", "train.batch_size=2", "sharding.gpus=2", *sets]
    by_fsdp = not any("zero" in word for word in sets)

    def act(rank: int) -> None:
        ran = {"lora": 0, "experts": 0}
        save_model, adapted, experts = run_module._save_model, lora_seam._weight, experts_seam.ops.experts

        def look(run: Any, prepared: Any, built: Any, trainer: Any) -> None:
            weights = [p for _, p in built.named_parameters() if not p.requires_grad and is_packed(built, p)]
            held = [p.to_local() if hasattr(p, "to_local") else p for p in weights]
            seen = {"own": sum(p.nbytes for p in held), "all": sum(p.numel() * p.itemsize for p in weights), **ran}
            (here / f"seen-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
            save_model(run, prepared, built, trainer)

        def counted(which: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                ran[which] += 1
                return original(*args, **kwargs)

            return call

        run_module._save_model = look  # in a copy of this process
        lora_seam._weight = counted("lora", adapted)
        experts_seam.ops.experts = counted("experts", experts)
        (fsdp_rank if by_fsdp else zero_rank)(recipe, words, resume=resume)

    said = succeeds(act, here, 2)
    assert "MaterializedLogitsWarning" not in said and "Params4bit" not in said
    return [json.loads((here / f"seen-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def is_packed(model: Any, parameter: Any) -> bool:
    return any(weight is parameter for _, weight, _ in packed_weights(model))


def merged(run: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in (run / "model").glob("*.safetensors") for name, weight in load_file(file).items()}


def relative(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight, by the largest value of that weight."""
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).float().abs().max() / other[k].float().abs().max()) for k in one)


FOUR_BIT = {
    "dense fp32": ("dense", QLORA, "tigon", "fp32"),
    "dense amp-bf16": ("dense", QLORA, "tigon", "amp-bf16"),
    "dense bf16": ("dense", (*QLORA, "train.checkpointing=selective"), "tigon", "bf16"),
    "dense without resharding": ("dense", (*QLORA, "sharding.reshard=false"), "tigon", "fp32"),
    "stored in 4 bits": ("stored in 4 bits", ("lora.rank=4",), "tigon", "fp32"),
    "dense without tigon": ("dense", QLORA, "none", "fp32"),
    "some layers": ("dense", (*QLORA, "lora.targets=[q_proj]"), "tigon", "amp-bf16"),
    "experts frozen": ("experts", QLORA, "tigon", "fp32"),
    "experts fp32": ("experts", (*QLORA, ON_EXPERTS), "tigon", "fp32"),
    "experts amp-bf16": ("experts", (*QLORA, ON_EXPERTS, "train.checkpointing=full"), "tigon", "amp-bf16"),
    "mxfp4": ("mxfp4", (*QLORA, ON_EXPERTS, "lora.quantize_to=mxfp4", "model.attention=eager"), "tigon", "amp-bf16"),
}
FIRST = ("dense amp-bf16", "experts fp32")


@forks
@pytest.mark.parametrize("case", proved_by(FIRST, FOUR_BIT, "another precision, or other modules of the same kinds"))
def test_weights_in_4_bits_are_divided_and_train_as_in_one_process(case, recipe_for, tigon, here):
    need("bitsandbytes")
    kind, sets, kernels, precision = FOUR_BIT[case]
    in_shards = [text for text in sets if text.startswith("sharding.")]
    path = recipe_for(kind, [text for text in sets if text not in in_shards], kernels, precision=precision)
    assert tigon("train", path).code == 0
    one, two = here / "runs" / "one", here / "runs" / "two"
    seen = in_two(here, path, "two", "sharding.fsdp=true", *in_shards)
    for rank in seen:
        assert rank["own"] == rank["all"] / 2 > 0
        if kernels == "tigon":
            assert rank["lora"] > 0 and (rank["experts"] > 0) == (kind in ("experts", "mxfp4"))
    rounding = 1e-5 if precision == "fp32" else 0.02
    assert losses(two) == pytest.approx(losses(one), rel=rounding)
    assert losses(one)[-1] < losses(one)[0] - 0.02, "nothing was learned"
    assert relative(merged(two), merged(one)) < (1e-3 if precision == "fp32" else 0.1)


RESUMED = {
    "4 bits, FSDP2": ("experts", (*QLORA, ON_EXPERTS), ("sharding.fsdp=true",)),
    "4 bits, FSDP2, in the background": ("dense", (*QLORA, "train.save_async=true"), ("sharding.fsdp=true",)),
    "16 bits, FSDP2": ("experts", ("lora.rank=4", ON_EXPERTS), ("sharding.fsdp=true",)),
    "16 bits, ZeRO-3": ("experts", ("lora.rank=4", ON_EXPERTS), ("sharding.zero=3",)),
}


@forks
@pytest.mark.parametrize(
    "case", proved_by(["4 bits, FSDP2"], RESUMED, "the same checkpoints, of another engine or model")
)
def test_run_in_shards_resumes_with_the_losses_and_the_weights_of_the_whole_run(case, recipe_for, here):
    kind, sets, engine = RESUMED[case]
    need("bitsandbytes" if "4 bits" in case else None)
    need("deepspeed" if "ZeRO" in case else None)
    path = recipe_for(kind, sets, save_steps=2)
    in_two(here, path, "two", *engine)
    cut_back(here / "runs" / "two", "cut", 4)
    in_two(here, path, "cut", *engine, resume=True)
    whole, resumed = here / "runs" / "two", here / "runs" / "cut"
    assert losses(resumed) == losses(whole)
    assert relative(merged(resumed), merged(whole)) == 0


ON_EXPERTS_CASES = {
    "FSDP2 fp32": ("sharding.fsdp=true", "fp32", "tigon"),
    "FSDP2 amp-bf16": ("sharding.fsdp=true", "amp-bf16", "tigon"),
    "FSDP2 by PEFT": ("sharding.fsdp=true", "fp32", "none"),
    "ZeRO-3 fp32": ("sharding.zero=3", "fp32", "tigon"),
    "ZeRO-3 4 bits": ("sharding.zero=3", "4 bits", "tigon"),
    "ZeRO-2 4 bits": ("sharding.zero=2", "4 bits", "tigon"),
    "ZeRO-3 by PEFT": ("sharding.zero=3", "fp32", "none"),
}


@forks
@pytest.mark.parametrize("case", proved_by(["FSDP2 fp32", "ZeRO-3 fp32"], ON_EXPERTS_CASES, "other code on the shards"))
def test_adapters_on_experts_in_shards_train_as_in_one_process(case, recipe_for, tigon, here):
    engine, precision, kernels = ON_EXPERTS_CASES[case]
    need("deepspeed" if "ZeRO" in case else None)
    quantize = () if precision != "4 bits" else ("lora.quantize=true",)
    need("bitsandbytes" if quantize else None)
    precision = "fp32" if quantize else precision
    path = recipe_for("experts", ("lora.rank=4", ON_EXPERTS, *quantize), kernels, precision=precision)
    assert tigon("train", path).code == 0
    one, two = here / "runs" / "one", here / "runs" / "two"
    seen = in_two(here, path, "two", engine)
    assert all((rank["experts"] > 0) == (kernels == "tigon") for rank in seen)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5 if precision == "fp32" else 0.02)
    assert relative(merged(two), merged(one)) < (1e-3 if precision == "fp32" else 0.1)


def test_checkpoint_in_8_bits_is_refused_under_fsdp2():
    stored = SimpleNamespace(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    keys = {"lora.rank": 4, "sharding.fsdp": True, "sharding.gpus": 2}
    with pytest.raises(RecipeError, match=r"its weights in 8 bits, and FSDP2 divides no integers; set sharding\.fsdp"):
        check_quantized("stored", stored, Settings.of(keys))
    check_quantized("stored", stored, Settings.of({**keys, "sharding.fsdp": False}))


def test_weight_without_whole_elements_is_refused():
    weight = torch.nn.Parameter(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = object()
    model = torch.nn.ModuleDict({"q": torch.nn.Identity()})
    model["q"].weight = weight
    with pytest.raises(RecipeError, match=r"q has 6 bytes in 4 bits.*set sharding\.fsdp: false"):
        let_fsdp_divide(model, torch.float32, "cpu")
    let_fsdp_divide(model, torch.bfloat16, "cpu")
    assert weight.dtype == torch.bfloat16 and weight.shape == (3, 1)


@forks
@pytest.mark.parametrize("start", proved_by(["one"], ["one", "two"], "the other direction of the same formats"))
def test_resume_of_4_bits_changes_the_engine_and_a_checkpoint_is_exported(start, recipe_for, tigon, here):
    need("bitsandbytes")
    path, runs = recipe_for("experts", (*QLORA, ON_EXPERTS), save_steps=2), here / "runs"
    assert tigon("train", path).code == 0
    in_two(here, path, "two", "sharding.fsdp=true")
    cut_back(runs / start, "cut", 4)
    if start == "one":
        in_two(here, path, "cut", "sharding.fsdp=true", resume=True)
    else:
        outcome = tigon("train", path, "--set", "output.name=cut", "--resume")
        assert outcome.code == 0, outcome.err
    assert losses(runs / "cut") == pytest.approx(losses(runs / "one"), rel=1e-5)
    assert relative(merged(runs / "cut"), merged(runs / "one")) < 1e-3
    for name in ("one", "two"):
        outcome = tigon("export", runs / name / "checkpoints" / "checkpoint-4", here / name, "--merge")
        assert outcome.code == 0, outcome.err
    exported = [load_file(here / name / "model.safetensors") for name in ("one", "two")]
    assert relative(*exported) < 1e-3
