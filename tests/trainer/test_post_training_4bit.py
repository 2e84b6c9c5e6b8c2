"""QLoRA with TRL's trainers through `tigon train`: the reference, the adapters' dtype, the score layer, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_post_training import EQUAL_MODELS, OWN, REWARDS, sections
from tiny_checkpoint import save
from trainer_helpers import records, tree

from second_proofs import proved_by

pytest.importorskip("bitsandbytes")

WIDE = {"hidden_size": 64, "intermediate_size": 64}
"""bitsandbytes 0.50.2 dequantises rows on a CPU rightly only if their length is a multiple of its block of 64."""
PRECISIONS = ("fp32", "amp-bf16", "bf16")
VARIES = {"event", "tokens_per_s", "memory_bytes", "memory_peak_bytes", "step_time"}


@pytest.fixture(autouse=True)
def files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint and the module of the rewards."""
    (here / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    save(here / "checkpoint", initializer_range=0.3, **WIDE)


def four_bit(objective: str, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a short run with adapters over the checkpoint's weights in NF4."""
    own = {"distill": {"base_steps": 0, "teacher": "checkpoint"}, "grpo": {"beta": 0.1}}
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "checkpoint", "config": None},
        "data": {"sequence_length": 128, "vocab_size": 8192},
        "train": {"steps": 2, "eval_steps": None},
        "lora": {"rank": 4, "quantize": True},
        "post_training": {**OWN[objective], **own.get(objective, {})},
        "output": {"sample_tokens": 0, "save_model": False},
    }
    for name, values in more.items():
        base[name] = {**base.get(name, {}), **values}
    return sections(objective, **base)


def trained(tigon: Any, path: Path, here: Path, name: str = "r") -> list[dict[str, Any]]:
    """The training records of the run, without times and memory."""
    outcome = tigon("train", path)
    assert outcome.code == 0, outcome.err
    return steady(here / "runs" / name)


def steady(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in VARIES} for record in records(run, "train")]


RUNS = [(objective, precision) for objective in OWN for precision in PRECISIONS]


@pytest.mark.parametrize(
    "run",
    proved_by(
        lambda run: run[1] == "fp32" or run[0] == "dpo",
        [run for run in RUNS if run[0] not in ("grpo", "distill") or run[1] == "fp32"],  # rounding changes their texts
        "fp32 tells losses apart that 16 bits would round together, and DPO has the other precisions",
        "-".join,
    ),
)
def test_losses_and_metrics_are_those_of_the_code_that_tigon_replaces(run, recipe, tigon, here):
    objective, precision = run
    found = []
    for kernels in ("none", "tigon"):
        more = {"model": {"kernels": kernels}, "train": {"precision": precision}, "output": {"name": kernels}}
        found.append(trained(tigon, recipe(**four_bit(objective, **more)), here, kernels))
    tolerance = 2e-4 if precision == "fp32" else 0.05
    if precision != "fp32":  # AdamW's first step turns roundings of gradients near 0 into whole steps
        found = [steps[:1] for steps in found]
    # Rewards and odds are differences of log-probabilities near 5, which bf16 rounds by up to 0.016.
    for want, got in zip(*found, strict=True):
        assert got.keys() == want.keys()
        assert got == pytest.approx(want, rel=tolerance, abs=min(tolerance, 0.02), nan_ok=True)
    patch = json.loads((here / "runs" / "tigon" / "summary.json").read_text())["patch"]
    assert ("tigon's head" in patch) == (objective != "reward") and "ref_model" not in patch


@pytest.mark.parametrize(
    "run",
    proved_by(
        lambda run: run[0] == "dpo" or run[1] == "bf16",
        [run for run in RUNS if run[0] in EQUAL_MODELS and run[0] != "distill"],
        "bf16 shows the slightest difference",
        "-".join,
    ),
)
def test_reference_is_the_model_without_its_adapter(run, recipe, tigon, here):
    objective, precision = run
    keys, exact = EQUAL_MODELS[objective]
    first, *_ = trained(
        tigon,
        recipe(**four_bit(objective, train={"precision": precision}, post_training={**OWN[objective], **keys})),
        here,
    )
    assert {name: first[name] for name in exact} == pytest.approx(exact, abs=1e-6 if "loss" in exact else 0)


DTYPES = {
    ("fp32", "auto"): (torch.float32, "adapters fp32 over 4-bit weights; a script of TRL trains them in bf16"),
    ("amp-bf16", "auto"): (torch.float32, "lora.adapter_dtype: bf16 does"),
    ("amp-bf16", "bf16"): (torch.bfloat16, "adapters bf16 over 4-bit weights, as in a script of TRL"),
    ("bf16", "auto"): (torch.bfloat16, "adapters bf16 over 4-bit weights"),
}


@pytest.mark.parametrize("case", DTYPES, ids="-".join)
def test_adapters_have_the_dtype_of_the_recipe_and_one_line_says_it(case, recipe, tigon, here):
    (precision, chosen), (dtype, says) = case, DTYPES[case]
    more = {"train": {"precision": precision}, "lora": {"adapter_dtype": chosen}, "output": {"save_model": True}}
    outcome = tigon("train", recipe(**four_bit("dpo", **more)))
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("adapters ")]
    assert says in line
    saved = load_file(here / "runs" / "r" / "adapters" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    assert all(float(tensor.float().abs().max()) > 0 for tensor in saved.values())


def test_adapters_begin_with_the_values_that_peft_drew(recipe, tigon, here):
    """TRL rounds them to bf16 while it makes its trainer."""
    found = []
    for objective, kernels in (("dpo", "tigon"), ("orpo", "tigon")):  # TRL's ORPO leaves given adapters as they are
        more = {"train": {"learning_rate": 1e-30, "steps": 1}, "model": {"kernels": kernels}}
        more["output"] = {"name": objective, "save_model": True}
        trained(tigon, recipe(**four_bit(objective, **more)), here, objective)
        found.append(load_file(here / "runs" / objective / "adapters" / "adapter_model.safetensors"))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items() if "lora_A" in name)
    assert any(not torch.equal(t, t.bfloat16().float()) for name, t in found[0].items() if "lora_A" in name)


@pytest.mark.parametrize(
    "objective", proved_by(["dpo", "reward"], ["dpo", "kto", "orpo", "grpo", "distill", "reward"], "as with dpo")
)
def test_run_resumes_exactly_and_merges_into_the_weights_of_the_checkpoint(objective, recipe, tigon, here):
    more = {
        "train": {"steps": 4, "save_steps": 1, "keep_checkpoints": 9},
        "output": {"save_model": True, "merge": True},
    }
    path = recipe(**four_bit(objective, **more))
    whole = trained(tigon, path, here)
    run = here / "runs" / "r"
    for number in (3, 4):
        for file in (run / "checkpoints" / f"checkpoint-{number}").iterdir():
            file.unlink()
        (run / "checkpoints" / f"checkpoint-{number}").rmdir()
    (run / "summary.json").unlink()
    before = load_file(run / "adapters" / "adapter_model.safetensors")
    outcome = tigon("train", path, "--resume")
    assert outcome.code == 0 and "checkpoint-2" in outcome.out, outcome.err
    assert steady(run) == whole
    after = load_file(run / "adapters" / "adapter_model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not [name for name in tree(run) if "/ref/" in name]
    merged, plain = load_file(run / "model" / "model.safetensors"), load_file(here / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    adapter = f"base_model.model.{name.removesuffix('.weight')}"
    update = 2 * after[f"{adapter}.lora_B.weight"] @ after[f"{adapter}.lora_A.weight"]
    assert update.abs().max() > 0
    torch.testing.assert_close(merged[name].float(), plain[name].float() + update, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("quantize", [False, True], ids=["LoRA", "QLoRA"])
def test_reward_model_trains_its_score_beside_adapters(quantize, recipe, tigon, here):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    more = {"lora": {"quantize": quantize}, "output": {"save_model": True, "merge": True}, "train": {"steps": 4}}
    trained(tigon, recipe(**four_bit("reward", **more)), here)
    run = here / "runs" / "r"
    adapters = load_file(run / "adapters" / "adapter_model.safetensors")
    (score,) = [tensor for name, tensor in adapters.items() if "score" in name]
    assert score.dtype == torch.float32 and not [name for name in adapters if "score" in name and "lora" in name]
    merged, loading = AutoModelForSequenceClassification.from_pretrained(run / "model", output_loading_info=True)
    assert not loading["missing_keys"]
    torch.testing.assert_close(merged.score.weight.float(), score, rtol=2**-8, atol=1e-3)
    base = AutoModelForSequenceClassification.from_pretrained(here / "checkpoint", num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run / "adapters").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        got, want = merged.float().eval()(input_ids=ids).logits, adapted(input_ids=ids).logits
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)  # the merged weights are in bf16
    outcome = tigon("export", "runs/r", "exported", "--merge", "--dtype", "fp32")
    assert outcome.code == 0, outcome.err
    again = AutoModelForSequenceClassification.from_pretrained(here / "exported").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, want, rtol=1e-4, atol=1e-4)


def stored_in(here: Path, method: dict[str, Any]) -> None:
    """Declare in the checkpoint's config that its weights are quantised by `method`."""
    file = here / "checkpoint" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}), encoding="utf-8")


@pytest.mark.parametrize("rank", [None, 4], ids=["full", "LoRA"])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_checkpoint_of_another_quantisation_is_refused_with_one_line(method, rank, recipe, tigon, here):
    stored_in(here, {"quant_method": method, "bits": 4})
    outcome = tigon("train", recipe(**four_bit("dpo", lora={"rank": rank, "quantize": rank is not None})))
    assert re.search(f"stores its weights with {method}, over which tigon does not train", outcome.error_line())
    assert not (here / "runs").exists()


def save_in_4_bits(folder: Path) -> None:
    """A copy of the checkpoint as bitsandbytes stores it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    AutoModelForCausalLM.from_pretrained("checkpoint", quantization_config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained("checkpoint").save_pretrained(folder)


def test_checkpoint_in_4_bits_trains_as_one_that_is_quantised_on_loading_and_merges(recipe, tigon, here):
    save_in_4_bits(here / "stored")
    found = []
    for name, quantize, sample in (("a", True, 0), ("b", False, 4)):
        more = {"model": {"name": "stored"}, "lora": {"quantize": quantize}}
        more["output"] = {"name": name, "save_model": True, "merge": True, "sample_tokens": sample}
        found.append(trained(tigon, recipe(**four_bit("dpo", **more)), here, name))
    assert found[0] == found[1]
    merged = load_file(here / "runs" / "a" / "model" / "model.safetensors")
    assert merged["model.layers.0.self_attn.q_proj.weight"].shape == (64, 64)
    assert "quantization_config" not in json.loads((here / "runs" / "a" / "model" / "config.json").read_text())
    outcome = tigon(
        "train", recipe(**four_bit("dpo", model={"name": "stored"}, lora={"rank": None, "quantize": False}))
    )
    assert "stores its weights with bitsandbytes, and integers get no gradient; set lora.rank" in outcome.error_line()


REFUSED = {
    "whole 4-bit model": ({"lora": {"rank": None}}, "4-bit weights get no gradient"),
    "fp32 adapters in a bf16 run": (
        {"lora": {"adapter_dtype": "fp32"}, "train": {"precision": "bf16"}}, "this precision keeps every weight in bf16"
    ),
    "bf16 adapters under fp16": (
        {"lora": {"adapter_dtype": "bf16"}, "train": {"precision": "amp-fp16"}}, "has not been tried with gradients in"
    ),
    "another dtype": ({"lora": {"adapter_dtype": "fp16"}}, "lora.adapter_dtype"),
    "pissa": ({"lora": {"init": "pissa"}}, "lora.init"),
    "loftq": ({"lora": {"init": "loftq"}}, "the reference of this objective is the model without adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_recipe_is_refused_with_one_line(case, recipe, tigon, here):
    more, says = REFUSED[case]
    assert says in tigon("train", recipe(**four_bit("dpo", **more))).error_line()
    assert not (here / "runs").exists()
