"""The planner in `tigon train`: what it asks, what it says, and what --auto and running out of memory lead to."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest
import torch

from tests.planner.planner_helpers import small_gpu
from tigon.errors import RecipeError
from tigon.objectives import recipe_checks
from tigon.planner.gpus import GIB, MIB, find_gpu, row_of
from tigon.planner.simulate import allocator
from tigon.techniques.keys.settings import Settings
from tigon.trainer import model
from tigon.trainer.distributed import launch
from tigon.trainer.guards import prediction, preflight

TEXT = "model: {name: tigon-demo}\ndata: {sequence_length: 1024}\ntrain: {steps: 2, batch_size: 16, {more}}\n"


@pytest.fixture
def recipe_of(tmp_path):
    path = tmp_path / "r.yaml"

    def load(more="optimizer: adamw-foreach, precision: amp-bf16", overrides=()):
        path.write_text(TEXT.replace("{more}", more))
        return recipe_checks.load(path, overrides, gpu_present=lambda: True)

    return load


def asked(recipe):
    return recipe, model.load_config(recipe.model), recipe.settings(precision="amp-bf16")


def predicted(recipe, memory_mib):
    return prediction.predict(*asked(recipe), small_gpu(memory_mib), evaluated=True)


def test_request_to_the_planner_describes_the_run_of_the_recipe(recipe_of):
    recipe = recipe_of("max_grad_norm: 0, gradient_accumulation: 2, checkpointing: full")
    request = prediction.request_of(*asked(recipe), evaluated=False)
    assert (request.batch, request.seq, request.clipped, request.masked) == (16, 1024, False, True)
    assert (request.settings.train.gradient_accumulation, request.settings.train.checkpointing) == (2, "full")
    joined = recipe_of(overrides=["data.cross_document_attention=true"])
    assert not prediction.request_of(*asked(joined), evaluated=False).masked


def test_only_a_run_that_does_not_fit_is_warned_about(recipe_of):
    assert len(predicted(recipe_of(), 8000).lines("tigon train r.yaml")) == 1
    _, warning = predicted(recipe_of(), 700).lines("tigon train r.yaml")
    assert warning.startswith("warning") and "This fits: " in warning and "tigon train r.yaml --set" in warning


def test_offload_of_more_than_the_host_memory_is_warned_about(recipe_of, monkeypatch):
    recipe = recipe_of("checkpointing: offload")
    monkeypatch.setattr(prediction, "host_free_bytes", lambda: 1 << 40)
    assert len(predicted(recipe, 8000).lines("tigon train r.yaml")) == 1
    monkeypatch.setattr(prediction, "host_free_bytes", lambda: 1 << 20)
    _, warning = predicted(recipe, 8000).lines("tigon train r.yaml")
    assert warning.startswith("warning") and "of host memory" in warning


def test_what_fits_command_leads_to_a_recipe_that_fits(recipe_of):
    recipe = recipe_of()
    _, warning = predicted(recipe, 700).lines("tigon train r.yaml")
    words = shlex.split(warning.partition(": tigon train r.yaml ")[2])
    assert words[::2] == ["--set"] * (len(words) // 2)
    better = predicted(recipe_of(overrides=words[1::2]), 700)
    assert better.option.fits(small_gpu(700))
    assert (
        better.option.request.batch * better.option.request.settings.train.gradient_accumulation
        == recipe.train.batch_size
    )


def test_auto_changes_no_key_that_the_recipe_sets(recipe_of):
    recipe = recipe_of("checkpointing: full, optimizer: lion-8bit, precision: fp32")
    free = prediction.free_in(recipe)
    assert not free & {"train.checkpointing", "train.optimizer", "train.precision"} and "sharding.zero" in free
    assignments, _ = prediction.choose(*asked(recipe_of("checkpointing: full")), small_gpu(8000))
    assert assignments == [], "it fits as it is"


def test_auto_keeps_the_numbers_if_it_can(recipe_of):
    assignments, said = prediction.choose(*asked(recipe_of("")), small_gpu(700))
    recipe = recipe_of("", overrides=assignments)
    assert recipe.settings().train.optimizer == "adamw" and recipe.settings().train.precision == "amp-bf16"
    assert predicted(recipe, 700).option.fits(small_gpu(700)) and assignments[0] in said


def test_auto_is_refused_if_nothing_fits(recipe_of):
    with pytest.raises(RecipeError, match=r"--auto: no setting .* fit "):
        prediction.choose(*asked(recipe_of("gradient_accumulation: 2")), small_gpu(20))


def test_auto_is_refused_on_a_cpu_and_with_resume(recipe_of):
    for resume, words in ((False, "on the CPU"), (True, "--resume")):
        with pytest.raises(RecipeError, match=words):
            prediction.choices_of_auto(recipe_of(), torch.device("cpu"), resume=resume)


def test_auto_is_refused_under_a_launcher_that_has_not_chosen(recipe_of, monkeypatch):
    """tigon's own launcher chooses before it starts the processes."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match=r"^--auto under a launcher such as torchrun: .* leave --auto out"):
        prediction.choices_of_auto(recipe_of(), torch.device("cuda"), resume=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        prediction.choices_of_auto(recipe_of(), torch.device("cuda"), resume=False)
    monkeypatch.setenv(launch.LAUNCHER, "7")
    assert prediction.choices_of_auto(recipe_of(), torch.device("cuda"), resume=False) == []


def setup_of(recipe, device="cpu"):
    """What a prediction reads of a setup."""
    config, settings = asked(recipe)[1:]
    return SimpleNamespace(recipe=recipe, config=config, settings=settings, device=torch.device(device))


def test_out_of_memory_says_needed_and_available_memory_and_the_command_that_fits(recipe_of, tmp_path):
    found = predicted(recipe_of(), 700)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
    said = prediction.out_of_memory(error, setup_of(recipe_of()), found, tmp_path, "tigon train r.yaml")
    needed = found.option.estimate.device_bytes / 2**30
    for words in (f"needed {needed:.2f} GiB", "had 0.68 GiB", "1.50 GiB", "This fits: ", "tigon train r.yaml --set"):
        assert words in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("idle", "set_already", "said"), [("5.60 GiB", "", True), ("912.00 MiB", "", False), ("5.60 GiB", "true", False)]
)
def test_out_of_memory_from_fragmentation_says_how_to_join_the_pieces(
    recipe_of, tmp_path, monkeypatch, idle, set_already, said
):
    monkeypatch.setenv(allocator.ALLOCATOR_SETTINGS, "expandable_segments:True" if set_already else "")
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 5.54 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is "
        f"free. Of the allocated memory 15.00 GiB is allocated by PyTorch, and {idle} is reserved by PyTorch but "
        "unallocated."
    )
    text = prediction.out_of_memory(error, setup_of(recipe_of()), None, tmp_path, "tigon train r.yaml")
    words = "5.60 GiB were free but fragmented; PyTorch can use them with PYTORCH_CUDA_ALLOC_CONF"
    assert (words in text) == said


def test_out_of_memory_recommends_a_recipe_that_needs_less(recipe_of, tmp_path):
    """If the prediction said that the recipe fits, the recommendation has to be smaller than the recipe that failed."""
    found = predicted(recipe_of(), 8000)
    said = prediction.what_fits(found, "tigon train r.yaml", failed=True)
    words = shlex.split(said.partition(": tigon train r.yaml ")[2])
    better = predicted(recipe_of(overrides=words[1::2]), 8000)
    assert words and better.option.estimate.peak_allocated_bytes < found.option.estimate.peak_allocated_bytes


def test_cpu_run_gets_no_prediction(recipe_of):
    said = prediction.announce(setup_of(recipe_of()), "", evaluated=True)
    assert said == (None, []) and prediction.compared(None, torch.device("cpu")) is None


def test_run_that_the_planner_cannot_predict_starts_with_the_reason(recipe_of, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(prediction, "gpu_here", lambda device, settings: small_gpu(8000))
    recipe = recipe_of("objective: dpo", overrides=["data.source=toy-answers", "model.kernels=none"])
    found, lines = prediction.announce(setup_of(recipe, "cuda"), "", evaluated=True)
    (line,) = lines
    assert found is None and line.startswith("plan     no prediction: the planner ") and "; set " in line


@pytest.mark.parametrize("keys", [("sharding.gpus=2",), ("sharding.fsdp=true",), ("sharding.zero=3",)])
def test_post_training_in_several_processes_starts_with_its_plan(keys, recipe_of, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(prediction, "gpu_here", lambda device, settings: small_gpu(8000))
    recipe = recipe_of("objective: dpo", overrides=["data.source=toy-answers", *keys])
    found, lines = prediction.announce(setup_of(recipe, "cuda"), "", evaluated=True)
    assert found is not None and lines[0].startswith("plan     peak per GPU ")


def test_comparison_shows_the_error_relative_to_the_measurement(recipe_of):
    found = predicted(recipe_of(), 8000).as_mapping()
    measured = {name: int(found[name] / 1.02) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
    assert prediction.comparison_line({"predicted": found, "measured": measured}).count("(+2.0%)") == 2


NAMES = {
    "NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA GeForce RTX 4090": "rtx-4090", "NVIDIA L4": "l4",
    "AMD Instinct MI300X": "mi300x",
}  # fmt: skip


@pytest.mark.parametrize(("said", "row"), NAMES.items())
def test_gpu_is_found_by_the_name_of_the_driver(said, row):
    assert row_of(said, 1 << 35).name == row


def test_unknown_gpu_keeps_its_memory_size():
    assert row_of("Some GPU", 24 << 30).memory_bytes == 24 << 30


@pytest.mark.parametrize(("joined", "short_mib"), [(True, 0), (False, 848)])
def test_memory_held_by_this_process_is_not_subtracted_from_its_gpu(joined, short_mib, monkeypatch):
    """An H200 without other processes, of which the context, NCCL's buffers and 1 GiB of tensors are gone."""
    row, total = find_gpu("h200"), find_gpu("h200").memory_bytes
    gone = row.context_bytes + row.group_bytes + GIB
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - gone, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joined)
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    gpu = prediction.gpu_here(torch.device("cuda", 0), Settings.of({"sharding.gpus": 2, "sharding.fsdp": True}))
    assert gpu.memory_bytes == total - short_mib * MIB


def test_gpu_that_other_processes_have_filled_is_refused_in_one_line(monkeypatch):
    def full(device):
        raise torch.AcceleratorError("CUDA error: out of memory")

    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(RecipeError, match=r"cuda:0: other processes have filled this GPU .*nvidia-smi"):
        prediction.gpu_here(torch.device("cuda:0"), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the allocator's memory is compared")
def test_gpu_of_this_machine_has_at_most_the_memory_of_the_driver(recipe_of):
    device = torch.device("cuda", 0)
    gpu = prediction.gpu_here(device, Settings.of({}))
    assert 0 < gpu.memory_bytes <= torch.cuda.get_device_properties(device).total_memory
    found, lines = prediction.announce(setup_of(recipe_of(), "cuda:0"), "tigon train r.yaml", evaluated=True)
    assert found is not None and lines and preflight.gpu_present()
