"""`auto`: the fastest recomputation that fits, by layers and micro-batches, and what the trainer makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_helpers import config_of, request_of, small_gpu
from transformers import AutoConfig

from tigon.errors import RecipeError, UsageError
from tigon.objectives import recipe_checks
from tigon.planner.estimate import estimate
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.planner.search.checkpointing import Beside, choose, fastest
from tigon.planner.search.option import Option, estimate_option
from tigon.techniques.checkpointing.layer_checkpointing import groups_of, written
from tigon.techniques.keys.settings import Settings
from tigon.techniques.keys.train import STATES
from tigon.trainer.guards import auto_checkpointing, prediction, preflight

LAYERS = 3
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 256}


def asked(**settings: Any) -> Request:
    return request_of("llama", batch=8, seq=256, shape=SHAPE, **{"precision": "bf16", "kernels": "tigon", **settings})


def estimate_of(request: Request, checkpointing: str) -> Option:
    settings = request.settings.having({"train.checkpointing": checkpointing})
    return estimate_option(replace(request, settings=settings), small_gpu(4000))


def between(request: Request, share: float) -> Gpu:
    """A GPU with the memory of full checkpointing, and this share of what keeping everything adds."""
    full, none = (estimate_of(request, name).estimate.device_bytes for name in ("full", "none"))
    return replace(small_gpu(4000), memory_bytes=int(full + share * (none - full)))


def every_mix() -> list[str]:
    pairs = itertools.combinations(STATES, 2)
    return ["none", "full", f"mlp:{LAYERS}", f"elementwise:{LAYERS}"] + [
        written([first] * (LAYERS - n) + [second] * n) for first, second in pairs for n in range(1, LAYERS)
    ]


def test_choice_is_the_fastest_mix_of_two_kinds_that_fits() -> None:
    request = replace(asked(), batch=32)  # with 8, the allocator's 2 MiB segments hide what a layer keeps
    options = [estimate_of(request, value) for value in every_mix()]
    for share in (0.15, 0.4, 0.7):
        gpu = between(request, share)
        chosen = fastest(request, gpu)
        assert chosen.fits(gpu)
        best = min(one.estimate.step_s for one in options if one.fits(gpu))
        assert chosen.estimate.step_s <= 1.005 * best, chosen.request.settings.train.checkpointing


def test_nothing_is_recomputed_if_there_is_room_and_all_of_it_if_nothing_fits() -> None:
    request = asked()
    assert fastest(request, between(request, 1.0)).request.settings.train.checkpointing == "none"
    chosen = fastest(request, small_gpu(1))
    assert chosen.request.settings.train.checkpointing == "full" and not chosen.fits(small_gpu(1))


def test_layers_that_recompute_more_come_first() -> None:
    request, lengths = asked(), set()
    for share in (0.4, 0.6, 0.8):
        value = fastest(request, between(request, share)).request.settings.train.checkpointing
        order = [STATES.index(state) for state, _ in groups_of(value)] if ":" in value else [0]
        assert order == sorted(order), value
        lengths.add(len(order))
    assert 2 in lengths


def test_zero_3_recomputes_whole_layers_only() -> None:
    request = asked(zero=3, gpus=2)
    value = fastest(request, between(request, 0.7)).request.settings.train.checkpointing
    assert {state for state, _ in groups_of(value)} == {"full", "none"}


def test_micro_batch_is_chosen_with_the_layers() -> None:
    request = asked()
    splits = [(8, 1), (4, 2), (2, 4), (1, 8)]
    gpu = between(request, 0.6)
    choice = choose(request, gpu, splits)
    chosen = choice.option.request
    assert choice.option.fits(gpu) and (chosen.batch, chosen.settings.train.gradient_accumulation) in splits
    alone = fastest(request, gpu)
    assert choice.option.estimate.tokens_per_s >= alone.estimate.tokens_per_s
    whole = choose(request, between(request, 1.0), splits).option.request
    assert (whole.batch, whole.settings.train.gradient_accumulation, whole.settings.train.checkpointing) == (
        8,
        1,
        "none",
    )


def test_batch_stays_whole_if_gradients_would_not_fit_beside_the_activations_of_its_parts() -> None:
    """Micro-batches hold the gradients in their forward passes. The one batch does not."""
    shape = {"num_hidden_layers": LAYERS, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 256}
    request = request_of("llama", batch=4, seq=96, shape=shape, precision="bf16", kernels="tigon")

    def peak_bytes(option: Option) -> int:
        return option.estimate.peak_allocated_bytes

    limit_bytes = peak_bytes(estimate_of(request, "full"))
    gpu = replace(small_gpu(4000), memory_bytes=limit_bytes)
    choice = choose(request, gpu, [(4, 1), (2, 2), (1, 4)], needs=peak_bytes)
    divided = [option for (batch, _), option in choice.seen.items() if batch != 4]
    assert divided and min(map(peak_bytes, divided)) > limit_bytes
    assert choice.option.request.batch == 4 and peak_bytes(choice.option) <= limit_bytes


def test_inputs_of_layers_go_to_the_host_only_if_recomputation_alone_does_not_fit() -> None:
    shape = {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 256}
    request = request_of("llama", batch=8, seq=512, shape=shape, precision="bf16", kernels="tigon", lora_rank=2)

    def peak_bytes(option: Option) -> int:
        return option.estimate.peak_allocated_bytes

    def chosen(limit_bytes: int, **how: Any) -> Option:
        return choose(request, replace(small_gpu(4000), memory_bytes=limit_bytes), needs=peak_bytes, **how).option

    full, offload = (peak_bytes(estimate_of(request, name)) for name in ("full", "offload"))
    assert offload < full
    tight = (offload + full) // 2
    assert peak_bytes(chosen(tight)) > tight
    on_host = chosen(tight, beside=Beside(host=True))
    assert on_host.request.settings.train.checkpointing == "offload" and peak_bytes(on_host) <= tight
    assert peak_bytes(chosen(tight, beside=Beside(host=True, host_bytes=on_host.all_host_bytes))) <= tight
    assert peak_bytes(chosen(tight, beside=Beside(host=True, host_bytes=on_host.all_host_bytes - 1))) > tight
    assert chosen(full, beside=Beside(host=True)).request.settings.train.checkpointing != "offload"


def test_attentions_results_go_to_the_host_if_that_is_faster_than_any_recomputation_that_fits() -> None:
    shape = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 65536}
    settings = {"precision": "bf16", "kernels": "tigon", "lora_rank": 2}

    def chosen(request: Request, **how: Any) -> str:
        gpu = between(request, 0.05)
        option = choose(request, gpu, beside=Beside(host=True, **how)).option
        assert option.fits(gpu)
        return option.request.settings.train.checkpointing

    long = request_of("llama", batch=1, seq=65536, shape=shape, **settings)
    kinds = {kind: estimate_of(long, kind).estimate.step_s for kind in ("full", "offload-attention")}
    assert kinds["offload-attention"] < kinds["full"]
    assert chosen(long) == "offload-attention"
    assert chosen(long, host_bytes=2**20) != "offload-attention", "the host lacks the memory"
    assert chosen(replace(long, masked=True)) != "offload-attention", "a mask has attention computed twice"
    assert chosen(replace(long, batch=16, seq=1024)) != "offload-attention", "short samples are not tried"


@pytest.mark.parametrize(
    ("precision", "memory_mib", "fused"),
    [("amp-bf16", 4000, True), ("amp-bf16", 1, True), ("bf16", 4000, True), ("bf16", 1, False), ("fp32", 4000, False)],
)
def test_micro_batches_add_up_gradients_in_their_products_where_it_pays(precision, memory_mib, fused) -> None:
    request, gpu = asked(precision=precision), small_gpu(memory_mib)
    beside = Beside(fusion=True)
    train = choose(request, gpu, [(2, 4)], beside=beside).option.request.settings.train
    assert train.gradient_accumulation_fusion == fused and (train.checkpointing == "none") == (memory_mib > 1)
    assert not choose(request, gpu, [(8, 1)], beside=beside).option.request.settings.train.gradient_accumulation_fusion
    assert not choose(request, gpu, [(2, 4)]).option.request.settings.train.gradient_accumulation_fusion
    adapted = asked(precision=precision, lora_rank=2)
    train = choose(adapted, gpu, [(2, 4)], beside=beside).option.request.settings.train
    assert not train.gradient_accumulation_fusion


def test_layers_become_graphs_only_where_nothing_forbids_them() -> None:
    gpu, beside = replace(small_gpu(4000), host_s=1e-4), Beside(graphs=True)

    def graphs(request: Request, gpu: Gpu = gpu, beside: Beside = beside) -> bool:
        return bool(choose(request, gpu, beside=beside).option.request.settings.train.cuda_graphs)

    request = asked(precision="bf16")
    assert graphs(request) and not graphs(request, beside=Beside())
    assert graphs(request, gpu=replace(gpu, host_s=0.0)), "a slower host than the GPU's record would wait"
    wide = {"hidden_size": 4096, "intermediate_size": 8192}
    long = request_of("llama", batch=16, seq=512, shape=wide, precision="bf16", kernels="tigon")
    assert not graphs(long, gpu=replace(small_gpu(70000), host_s=0.0)), "every host that was measured is faster"
    assert graphs(asked(precision="bf16", lora_rank=2))
    in_4_bits = asked(precision="bf16", lora_rank=2)
    assert graphs(replace(in_4_bits, settings=in_4_bits.settings.having({"lora.quantize": True})))
    with_dora = in_4_bits.settings.having({"lora.dora": True})
    assert not graphs(replace(in_4_bits, settings=with_dora)), "DoRA was not tried"
    off = replace(request, settings=request.settings.having({"train.cuda_graphs": False}))
    assert not graphs(off)


@pytest.mark.parametrize("packing", [True, None])
def test_auto_of_a_packed_hybrid_model_chooses_what_keeps_its_documents_apart(packing: bool | None) -> None:
    recipe = recipe_checks.of_assignments([]).having({"data.packing": packing, "data.sequence_length": 64})
    settings = recipe.settings().having({"train.checkpointing": "none", "train.precision": "bf16"})
    gpu = replace(small_gpu(4000), host_s=1e-4)

    def graphs_of(config: Any) -> bool | None:
        request = prediction.request_of(recipe, config, settings, evaluated=False)
        chosen, _ = auto_checkpointing.chosen_for(recipe, request, gpu)
        preflight.check_documents(chosen, config)
        return chosen.train.cuda_graphs

    hybrid = AutoConfig.for_model(
        "lfm2", vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    assert not graphs_of(hybrid) and graphs_of(config_of("llama"))


def test_auto_itself_has_no_estimate() -> None:
    with pytest.raises(UsageError, match=r"checkpointing is auto, which stands for a choice"):
        estimate(asked(checkpointing="auto"), gpu=small_gpu(100))


def test_value_for_another_depth_is_refused_before_the_run() -> None:
    with pytest.raises(RecipeError, match="full:2 is for 2 layers, but the model has 3"):
        estimate(asked(checkpointing="full:2"), gpu=small_gpu(100))


# --- in the trainer --------------------------------------------------------------------------------------------------

TEXT = (
    "model: {name: tigon-demo}\ndata: {sequence_length: 256}\ntrain: {steps: 2, batch_size: 8, precision: amp-bf16%s}\n"
)


def recipe_of(tmp_path: Any, more: str = "") -> Any:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT % more)
    return recipe_checks.load(path, (), gpu_present=lambda: True)


def test_recipe_leaves_the_choice_open_and_a_cpu_recomputes_nothing(tmp_path, capsys) -> None:
    recipe = recipe_of(tmp_path)
    assert recipe.train.checkpointing == "auto" and recipe.settings() == Settings.of({})
    assert auto_checkpointing.resolved(recipe, torch.device("cpu")).train.checkpointing == "none"
    fixed = recipe_of(tmp_path, ", checkpointing: full")
    assert auto_checkpointing.resolved(fixed, torch.device("cuda")) is fixed
    assert not capsys.readouterr().out
    key = "train.checkpointing"
    assert key in prediction.free_in(recipe) and key not in prediction.free_in(fixed)
    assert key not in prediction.free_in(recipe_of(tmp_path, ", checkpointing: none"))


@pytest.mark.parametrize("more", ["", ", gradient_accumulation: 2"])
def test_run_on_a_gpu_gets_a_choice_that_fits_and_keeps_its_samples(tmp_path, monkeypatch, capsys, more) -> None:
    recipe = recipe_of(tmp_path, more)
    gpu = small_gpu(290)
    monkeypatch.setattr(prediction, "gpu_here", lambda device, settings: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)
    chosen = auto_checkpointing.resolved(recipe, torch.device("cuda"))
    samples = [r.train.batch_size * r.train.gradient_accumulation for r in (recipe, chosen)]
    assert samples[0] == samples[1]
    if more:
        assert chosen.train.batch_size == recipe.train.batch_size
    line = capsys.readouterr().out
    assert line.startswith(f"auto     train.checkpointing={chosen.train.checkpointing}")
    config = auto_checkpointing.models.load_config(chosen.model)
    found = prediction.predict(chosen, config, chosen.settings(), gpu, evaluated=True)
    assert found.option.fits(gpu) and chosen.train.checkpointing != "auto"


def test_model_that_cannot_be_predicted_recomputes_nothing_and_says_so(tmp_path, monkeypatch, capsys) -> None:
    def fails(*args: Any) -> Any:
        raise UsageError("its step cannot be traced")

    monkeypatch.setattr(prediction, "gpu_here", fails)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: True)
    chosen = auto_checkpointing.resolved(recipe_of(tmp_path), torch.device("cuda"))
    assert chosen.train.checkpointing == "none" and chosen.train.batch_size == 8
    assert "nothing is recomputed, because the planner has no prediction: its step cannot" in capsys.readouterr().out
