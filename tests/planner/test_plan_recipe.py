"""`tigon plan` of a recipe, of a method, with a limit on host memory, and on GPUs without bf16."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

pytest.importorskip("rich")
from tests.planner.planner_helpers import config_of, request_of, small_gpu
from tigon.cli.plan_request import Flags, problem_of
from tigon.cli.shared import UNLIMITED, stdout_console
from tigon.cli.short_forms import keys_of
from tigon.errors import TigonError
from tigon.models.loading.presets import HUB_SHAPES, PRESETS
from tigon.objectives import recipe_checks
from tigon.planner.gpus import GIB, find_gpu
from tigon.planner.render import as_recipe, terminal
from tigon.planner.search import longest, space
from tigon.planner.search.longest import longest_rows
from tigon.planner.search.recommend import Plan, estimate_option, recommendations
from tigon.planner.search.space import CROSS_DOCUMENT, Fallback, SearchProblem
from tigon.trainer.guards import prediction

pytestmark = pytest.mark.usefixtures("in_one_process")
RECIPE = """
model: {name: tigon-demo, config: {num_hidden_layers: 2}}
data: {sequence_length: 96, eval_fraction: 0}
train: {steps: 3, batch_size: 3, optimizer: adamw-8bit, checkpointing: full, gradient_accumulation: 2}
on_gpu:
  data: {sequence_length: 64}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def problem(target, gpu="24GiB", *, given=None, batch=None, seq=None, medusa=None, objective=None, **flags):
    """given: by recipe key."""
    short = keys_of({"batch": batch, "seq": seq, "medusa": medusa, "objective": objective})
    return problem_of(Flags(target=str(target), gpu=find_gpu(gpu), given=short | (given or {}), **flags))


def test_plan_of_a_recipe_is_the_run_that_train_starts_on_a_gpu(recipe):
    request = problem(recipe).request
    loaded = recipe_checks.load(recipe, gpu_present=lambda: True)
    config = request.config
    assert request == prediction.request_of(loaded, config, loaded.settings(), evaluated=False)
    assert (config.num_hidden_layers, request.batch, request.seq) == (2, 3, 64), (
        "on_gpu applies, because a GPU is asked"
    )
    assert request.masked and not request.evaluated
    assert (request.settings.train.optimizer, request.settings.train.checkpointing) == ("adamw-8bit", "full")


def test_only_keys_that_the_recipe_leaves_out_are_free(recipe):
    found = problem(recipe)
    assert (
        "train.precision" in found.free
        and not {"train.optimizer", "train.checkpointing", "train.gradient_accumulation"} & found.free
    )
    assert "train.precision" not in problem(recipe, given={"train.precision": "bf16"}).free


def test_flags_and_set_change_the_recipe_and_stand_in_the_command(recipe):
    found = problem(recipe, batch=2, seq=32, given={"lora.rank": 4}, assignments=["data.cross_document_attention=true"])
    request = found.request
    assert (request.batch, request.seq, request.settings.lora.rank, request.masked) == (2, 32, 4, False)
    words = list(found.command)
    assert words[:3] == ["tigon", "train", str(recipe)]
    again = recipe_checks.load(recipe, words[4::2], gpu_present=lambda: True)
    assert again.settings() == request.settings and again.data.sequence_length == 32


def test_command_of_a_recipes_recommendation_sets_only_what_differs(recipe):
    found = problem(recipe)
    assert as_recipe.command(found.request, found.request, found.command) == f"tigon train {recipe}"
    changed = replace(
        found.request, batch=1, masked=False, settings=found.request.settings.having({"train.optimizer": "adamw"})
    )
    words = shlex.split(as_recipe.command(changed, found.request, found.command))
    again = recipe_checks.load(recipe, words[4::2], gpu_present=lambda: True)
    assert len(words) == 9 and again.settings() == changed.settings
    assert again.train.batch_size == 1 and again.data.cross_document_attention


@pytest.mark.parametrize(
    ("recipe_lines", "method", "expected"),
    [
        ("", "lora", (16, False)),
        ("lora: {rank: 4}", "qlora", (4, True)),
        ("lora: {rank: 4, quantize: true}", "lora", (4, False)),
        ("lora: {rank: 4, quantize: true}", "full", (None, False)),
        ("lora: {rank: 4}", "auto", (4, False)),
    ],
)
def test_method_changes_the_recipes_adapters(recipe, recipe_lines, method, expected):
    recipe.write_text(f"{RECIPE}{recipe_lines}\n")
    settings = problem(recipe, method=method).request.settings
    assert (settings.lora.rank, settings.lora.quantize) == expected


WRONG = {
    "heads": ({"medusa": 17}, "--medusa is 17"),
    "objective": ({"objective": "medusa"}, "use --medusa N"),
    "key": ({"assignments": ["train.batchsize=3"]}, "the nearest key is train.batch_size"),
    "value": ({"batch": 0}, "--batch is 0"),
    "device": ({"assignments": ["train.device=cpu"]}, "add --set train.device=auto"),
    "effective batch": ({"effective_batch": 4}, "not a multiple of 3"),
    "too long": ({"seq": 100_000}, "takes at most 2048 tokens"),
}


@pytest.mark.parametrize(("flags", "words"), WRONG.values(), ids=WRONG)
def test_what_a_recipe_cannot_take_is_refused_in_one_line(recipe, flags, words):
    with pytest.raises(TigonError) as caught:
        problem(recipe, **flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_recipe_that_does_not_exist_is_named():
    with pytest.raises(TigonError, match=r"absent\.yaml: no such recipe file"):
        problem("absent.yaml")


def test_effective_batch_sets_the_recipes_accumulation(recipe):
    assert problem(recipe, effective_batch=12).request.settings.train.gradient_accumulation == 4


# --- methods and fallbacks -------------------------------------------------------------------------------------------


def asked(memory_mib, **changes):
    """A question about a small model with documents apart, of which only checkpointing and placement may change."""
    # What FSDP2 gathers stays below 1 MiB: a larger tensor takes a segment of 20 MiB.
    shape = {"vocab_size": 1920, "hidden_size": 128, "intermediate_size": 128}
    request = request_of("llama", batch=2, seq=128, masked=True, shape=shape, optimizer="adamw")
    free = frozenset({"train.checkpointing"}) | changes.pop("free", frozenset())
    return SearchProblem(request=request, free=free, gpu=small_gpu(memory_mib), **changes)


LORA = Fallback(name="LoRA adapters", settings={"lora.rank": 8})
SHARDED = frozenset({"sharding.zero", "sharding.fsdp", "sharding.offload"})


def test_adapters_are_tried_only_if_full_fine_tuning_does_not_fit():
    full = estimate_option(asked(1).request, small_gpu(1)).estimate.device_bytes / 2**20
    found, _, fallback = recommendations(asked(2 * full, fallbacks=(LORA,)))
    assert fallback == "" and found[0].option.request.settings.lora.rank is None
    found, _, fallback = recommendations(asked(full / 2, fallbacks=(LORA,)))
    assert fallback == "LoRA adapters" and {one.option.request.settings.lora.rank for one in found} == {8}
    assert recommendations(asked(full / 2))[::2] == ([], "")


def test_host_memory_rules_out_recipes_that_offload_more():
    full = estimate_option(asked(1).request, small_gpu(1)).estimate.device_bytes / 2**20
    found, _, fallback = recommendations(asked(full / 2, free=SHARDED, fallbacks=(LORA,)))
    assert fallback, "everything that fits needs a host of unknown memory, so adapters are listed too"
    on_host = [one.option for one in found if one.option.estimate.host_bytes]
    assert on_host and not found[-1].option.estimate.host_bytes
    least = min(option.all_host_bytes for option in on_host)
    found, _, _ = recommendations(asked(full / 2, free=SHARDED, host_bytes=least - 1, fallbacks=(LORA,)))
    assert found and all(one.option.estimate.host_bytes == 0 for one in found)
    found, _, fallback = recommendations(asked(full / 2, free=SHARDED, host_bytes=least, fallbacks=(LORA,)))
    assert not fallback and {one.option.all_host_bytes for one in found} == {least}


def test_smallest_change_of_the_numbers_comes_first_and_each_is_named():
    free = frozenset({"train.precision", "train.optimizer"})
    found, _, _ = recommendations(asked(4000, free=free))
    ranks = [space.request_rank(one.option.request) for one in found]
    assert ranks == sorted(ranks) and space.change_names(found[0].option.request) == []
    joined = replace(asked(1).request, masked=False)
    assert space.change_names(joined) == [CROSS_DOCUMENT]
    changed = replace(joined, settings=joined.settings.having({"train.precision": "bf16"}))
    assert space.change_names(changed) == [CROSS_DOCUMENT, "bf16"]


def test_methods_that_flags_name_have_layers_on_the_host_as_their_only_fallback():
    names = {
        flags.get("method", str(flags)): [one.name for one in problem("tigon-demo", seq=64, **flags).fallbacks]
        for flags in ({}, {"method": "full"}, {"method": "lora"}, {"given": {"lora.rank": 4}})
    }
    host, four_bit = "frozen layers on the host", "QLoRA adapters on 4-bit weights"
    assert list(names.values()) == [["LoRA adapters", four_bit, f"{four_bit} and {host}"], [], [host], [host]]


def test_joined_documents_are_a_fallback_only_for_rows_whose_mask_is_large():
    long = problem("llama-3.2-1b", gpu="12GiB", seq=16384).fallbacks
    assert long[0] == Fallback(name=CROSS_DOCUMENT, cross_document=True)
    assert all(not one.cross_document for one in problem("llama-3.2-1b", gpu="12GiB", seq=2048).fallbacks)


# --- the longest row -------------------------------------------------------------------------------------------------


def test_longest_rows_fit_and_recomputing_more_reaches_further(monkeypatch):
    monkeypatch.setattr(longest, "TRIED", 2)
    config = config_of("llama", max_position_embeddings=1 << 14, num_hidden_layers=3)
    request = replace(request_of(batch=2, seq=64, optimizer="adamw"), config=config)
    gpu = small_gpu(60)
    question = SearchProblem(request=request, free=frozenset({"train.checkpointing"}), gpu=gpu)
    option = estimate_option(request, gpu)
    answer = Plan(
        problem=question, gpu=gpu, option=option, recommended=(), fallback="", refused=(), max_sizes=None,
        best_max_sizes=None,
    )  # fmt: skip
    rows = longest_rows(answer, keep_batch=False)
    kinds = [row.request.settings.train.checkpointing for row in rows]
    assert kinds[0] == "none" and kinds[-1] == "offload" and {row.request.batch for row in rows} == {1}
    lengths = [row.request.seq for row in rows]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] > 64
    assert all(row.option.estimate.device_bytes <= gpu.memory_bytes for row in rows)
    assert terminal.longest_mapping(rows[-1])["longest_sequence"] == lengths[-1]


# --- GPUs and output -------------------------------------------------------------------------------------------------


def test_command_of_a_recipe_with_adapters_on_a_preset_names_its_checkpoint(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {name: smollm2-135m}\ndata: {sequence_length: 64}\ntrain: {steps: 1, batch_size: 1}\n")
    assert "--set" not in problem(path).command
    path.write_text(path.read_text() + "lora: {rank: 4}\n")
    found = problem(path)
    assert found.request.model == "smollm2-135m"
    assert found.command[-2:] == ("--set", "model.name=HuggingFaceTB/SmolLM2-135M-Instruct")


def test_gpu_without_bf16_is_planned_in_fp16(recipe):
    found = problem("tigon-demo", gpu="t4")
    assert found.request.settings.train.precision == "amp-fp16"
    assert {settings.train.precision for settings in space.walks(found)} == {"amp-fp16"}
    assert problem(recipe, gpu="v100").request.settings.train.precision == "fp32", "train resolves auto to fp32 there"


def test_tables_do_not_wrap_in_a_pipe(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    stdout_console().print("word " * 100)
    assert capsys.readouterr().out.count("\n") == 1 and stdout_console().width == UNLIMITED
    monkeypatch.setenv("COLUMNS", "120")
    assert stdout_console().width == 120


def test_hub_ids_of_the_model_recipes_have_a_shape_without_a_download():
    assert set(HUB_SHAPES.values()) == PRESETS.keys() - {"tigon-demo"}, "commands name the checkpoint of every shape"
    found = problem("Qwen/Qwen3-0.6B", seq=64)
    assert found.request.model == "Qwen/Qwen3-0.6B" and found.request.config.num_hidden_layers == 28
    assert problem("Qwen/Qwen3-0.6B", seq=64, host_memory="64GiB").host_bytes == 64 * GIB


def test_plan_of_a_model_with_a_vision_tower_counts_the_tower_and_the_layers_of_text():
    found = problem("google/gemma-3-4b-it", seq=64, given={"train.precision": "bf16"})
    held = estimate_option(found.request, found.gpu).estimate.components
    # The published 4.3 B parameters: 3.88 B of text, 0.42 B of vision.
    assert held["weights"] == pytest.approx(2 * 4.30e9, rel=0.02)
    assert found.request.config.get_text_config().num_hidden_layers == 34
