"""Plans of runs with images: the tokens of the images, the trace through the vision tower, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from commands import tigon  # noqa: F401
from tests.short_names import settings_of
from tigon.data.images import load_processor
from tigon.errors import RecipeError, UsageError
from tigon.models.loading.config import load_config
from tigon.objectives import vision_language
from tigon.objectives.vision_language import planned_images
from tigon.planner.gpus import find_gpu
from tigon.planner.request import Request
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.playback import GradientRules, replay
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import Trace, trace
from tigon.profiler.recording.peak import PeakMeter, training_state
from tigon.techniques.keys.settings import Settings
from vision import FAMILIES, checkpoint_in, without_images

GPU = find_gpu("h200")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return partial(checkpoint_in, tmp_path_factory.mktemp("vision"))


pytestmark = pytest.mark.usefixtures("in_one_process")


def request_of(
    folder: Path, *, images: int = 1, batch: int = 2, seq: int = 128, layers: int = 2, **settings: Any
) -> Request:
    config = load_config(str(folder))
    config.get_text_config().num_hidden_layers = layers
    processor = load_processor(str(folder), revision=None, trust_remote_code=False)
    return Request(
        model=str(folder), config=config, batch=batch, seq=seq,
        settings=settings_of({"train.precision": "amp-bf16", **settings}),
        objective=planned_images(str(folder), config, images, 32, processor), masked=True, evaluated=True,
    )  # fmt: skip


def allocated(traced: Trace) -> int:
    return sum(traced.tape.sizes)


def live_peak(tape: Tape) -> int:
    ledger = Ledger()
    replay(ledger, tape, GradientRules(keep=True))
    return max(ledger.phases.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_image_tokens_as_the_processor_does(checkpoint, family):
    folder = checkpoint(family)
    processor = load_processor(str(folder), revision=None, trust_remote_code=False)
    layout = request_of(folder, images=2).objective.layout
    assert layout.n_image_tokens == layout.prompt.count(processor.image_token_id) > 2


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_images_is_traced_through_both_towers(checkpoint, family, checkpointing):
    folder = checkpoint(family)
    one = trace(request_of(folder, checkpointing=checkpointing), GPU)
    two = trace(request_of(folder, images=2, checkpointing=checkpointing), GPU)
    assert allocated(two) > allocated(one), "more images need more memory"
    assert one.eval_tape.segments


def test_a_trace_of_few_layers_is_unrolled_to_the_whole_models(checkpoint):
    request = request_of(checkpoint("smolvlm"), layers=7)
    assert allocated(trace(request, GPU)) == allocated(trace(request, GPU, whole=True))


def test_the_vision_towers_activations_grow_with_its_images(checkpoint):
    """Of one more image: at least the inputs of the tower's linear layers and norms, which backward needs."""
    sizes = [allocated(trace(request_of(checkpoint("smolvlm"), batch=batch), GPU)) for batch in (2, 3)]
    patches, hidden, layers = 16, 32, 2
    assert sizes[1] - sizes[0] > layers * 4 * patches * hidden * 2


def test_adapters_leave_the_vision_tower_without_gradients(checkpoint):
    pytest.importorskip("peft")
    full, lora = (trace(request_of(checkpoint("smolvlm"), **settings), GPU) for settings in ({}, {"lora_rank": 2}))
    assert allocated(lora) < allocated(full)


def test_inputs_have_the_shapes_of_a_batch_of_the_processor(checkpoint):
    request = request_of(checkpoint("smolvlm"), images=2, batch=3)
    inputs = request.objective.inputs(3, 128)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "input_ids": (3, 128), "attention_mask": (3, 128), "labels": (3, 128), "pixel_values": (3, 2, 3, 32, 32),
        "pixel_attention_mask": (3, 2, 32, 32),
    }  # fmt: skip
    n_image_tokens = request.objective.layout.n_image_tokens
    ids = load_config(request.model).image_token_id
    assert torch.equal((inputs["input_ids"] == ids).sum(dim=1), torch.full((3,), n_image_tokens))
    with pytest.raises(UsageError, match="seq is 20, but a question with its images has"):
        request.objective.inputs(3, 20)


def test_plans_with_other_images_are_traced_apart(checkpoint):
    one, same, two = (request_of(checkpoint("smolvlm"), images=n).objective for n in (1, 1, 2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != two


def test_models_of_text_and_too_many_images_are_refused(checkpoint, tmp_path):
    text = without_images(tmp_path / "text")
    with pytest.raises(RecipeError, match="reads text alone"):
        planned_images("text", load_config(str(text)), 1, None, None)
    objective = request_of(checkpoint("smolvlm"), images=2).objective
    most = vision_language.MOST_PLANNED_IMAGES
    assert objective.batch_refusal(most // 2) is None
    assert f"at most {most} images" in objective.batch_refusal(most // 2 + 1)


def test_the_command_plans_a_model_and_a_recipe_with_images(tigon, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = checkpoint("smolvlm")
    monkeypatch.setattr(vision_language, "MOST_PLANNED_IMAGES", 4)  # the search for the largest batch ends there
    words = ("--gpu", "24GiB", "--batch", "2", "--seq", "96", "--image-size", "32")
    planned = tigon("plan", folder, "--images", "1", *words)
    assert planned.code == 0, planned.err
    assert "4 image tokens" in planned.out
    assert "data.images=1" in planned.out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name: {folder}}}\ndata: {{source: rows.jsonl, images: 1}}\ntrain: {{steps: 2}}\n", encoding="utf-8"
    )
    from_recipe = tigon("plan", recipe, *words)
    assert from_recipe.code == 0, from_recipe.err
    peak = next(line for line in planned.out.splitlines() if "Peak" in line)
    assert peak in from_recipe.out


def test_the_command_refuses_flags_that_do_not_go_with_images(tigon, checkpoint, tmp_path):  # noqa: F811
    text, folder = without_images(tmp_path / "text"), checkpoint("smolvlm")
    gpu = ("--gpu", "24GiB")
    assert "--images is 1, but" in tigon("plan", text, "--images", "1", *gpu).error_line()
    assert "--image-size 32 requires --images N" in tigon("plan", folder, "--image-size", "32", *gpu).error_line()
    assert "leave --medusa" in tigon("plan", folder, "--images", "1", "--medusa", "2", *gpu).error_line()


def test_a_request_of_a_recipe_is_that_of_the_same_model(checkpoint, tmp_path):
    from tigon.objectives import recipe_checks
    from tigon.trainer.guards.prediction import request_of as of_recipe

    folder = checkpoint("smolvlm")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{name: {folder}}}\ndata: {{source: r.jsonl, images: 1, image_size: 32, sequence_length: 128}}\n"
        "train: {steps: 2, batch_size: 2}\n", encoding="utf-8",
    )  # fmt: skip
    recipe = recipe_checks.load(path, gpu_present=lambda: False)
    own = of_recipe(recipe, load_config(str(folder)), Settings.of({"train.precision": "amp-bf16"}), evaluated=True)
    assert own.objective == request_of(folder).objective
    assert own.by_tigon_train
    assert dataclasses.replace(own, config=None, model="", by_tigon_train=False) == dataclasses.replace(
        request_of(folder), config=None, model=""
    )


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.005), ("amp-bf16", 0.02)])
@pytest.mark.parametrize("family", ["smolvlm", "llava"])
def test_a_traced_step_with_images_has_the_peak_of_a_real_one(checkpoint, family, precision, tolerance):
    """Eager attention on the CPU runs the operators that are traced, so the peaks must agree.

    Autocast's lists of the CPU and of CUDA, for which the trace plans, differ: here by the q, k and v of a layer.
    """
    from transformers import AutoModelForImageTextToText

    folder, batch, seq = checkpoint(family), 6, 128
    request = request_of(folder, images=2, batch=batch, seq=seq, kernels="none", attention="eager")
    request = dataclasses.replace(
        request,
        settings=Settings.of({"train.precision": precision, "model.kernels": "none", "model.attention": "eager"}),
    )
    config = load_config(str(folder))
    config.use_cache = False
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).train()
    meter = PeakMeter(torch.device("cpu"))
    meter.start(training_state(model, torch.optim.SGD(model.parameters())))
    inputs = request.objective.inputs(batch, seq)
    for name, value in inputs.items():
        if value.is_floating_point():
            value.normal_()
        elif name.startswith("pixel"):
            value.fill_(1)
    inputs["labels"].random_(0, 200)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp-bf16"):
        outputs = model(**inputs, num_items_in_batch=torch.tensor(500))
    outputs.logits = outputs.logits.float()
    loss = outputs.loss
    del outputs
    loss.backward()
    measured = meter.stop().step_bytes
    assert live_peak(trace(request, GPU).tape) == pytest.approx(measured, rel=tolerance)
