"""Plans of post-training: what each objective holds and computes, and its trace beside a step of TRL on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planner_helpers import BARE, H200, config_of, peak_bytes, request_of, small_gpu
from transformers import AutoConfig

from benchmarks.cases.generation import QWEN3_4B
from tigon.errors import UsageError
from tigon.models.kv_cache import cache_argument, kv_widths
from tigon.models.loading.presets import PRESETS
from tigon.models.loading.reward_model import with_score
from tigon.objectives import recipe_checks
from tigon.objectives.base import PlannedObjective
from tigon.objectives.choose import planned_objective
from tigon.planner.estimate import Estimate, estimate
from tigon.planner.generation_time import completions_s
from tigon.planner.gpus import find_gpu
from tigon.planner.render import as_recipe
from tigon.planner.request import Request, build, refusals
from tigon.planner.search import space
from tigon.planner.search.space import SearchProblem
from tigon.planner.simulate.generation import generate
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import model_weights
from tigon.planner.trace.tape import Tape
from tigon.planner.trace.trace import trace, weight_dtype
from tigon.profiler.recording.peak import PeakMeter, storage_bytes, training_state
from tigon.techniques.keys.settings import Settings

ALL = ("dpo", "kto", "orpo", "grpo", "distill", "reward")
COMPLETION = 32
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200" / "post-training"
GEMMA_4 = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 64, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64, "sliding_window": 32,
}  # fmt: skip


def planned(objective: str, **keys: Any) -> PlannedObjective:
    keys = {"completion_length": COMPLETION, **keys} if objective in ("grpo", "distill") else keys
    keys = {"generations": 2, **keys} if objective == "grpo" else keys
    words = [f"post_training.{name}={value}" for name, value in keys.items()]
    return planned_objective(recipe_checks.of_assignments([*words, f"train.objective={objective}"]))


def asked(objective: str, *, keys: dict[str, Any] | None = None, **more: Any) -> Request:
    return request_of(objective=planned(objective, **(keys or {})), masked=True, **more)


def estimated(objective: str, **more: Any) -> Estimate:
    return estimate(asked(objective, **more), gpu=BARE)


def held(objective: str, **more: Any) -> int:
    return sum(model_weights(one).weight_bytes for one in asked(objective, **more).frozen())


# --- what a run holds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "keys", "lora", "copies"),
    [
        ("dpo", {}, None, 1), ("dpo", {}, 4, 0), ("kto", {}, None, 1), ("kto", {}, 4, 0), ("orpo", {}, None, 0),
        ("grpo", {}, None, 0), ("grpo", {"beta": 0.1}, None, 1), ("grpo", {"beta": 0.1}, 4, 0),
        ("distill", {}, None, 1), ("distill", {}, 4, 1), ("reward", {}, None, 0),
    ],
)  # fmt: skip
def test_frozen_model_adds_exactly_its_weights(objective, keys, lora, copies):
    one = model_weights(request_of()).weight_bytes
    assert held(objective, keys=keys, lora_rank=lora) == copies * one


@pytest.mark.parametrize(("objective", "lora", "copies"), [("dpo", None, 1), ("orpo", None, 0), ("distill", 4, 1)])
def test_peak_counts_the_frozen_weights_and_a_note_says_so(objective, lora, copies):
    one = model_weights(request_of()).weight_bytes
    own = model_weights(asked(objective, lora_rank=lora)).weight_bytes
    found = estimated(objective, lora_rank=lora)
    assert found.components["weights"] == own + copies * one
    assert any("second, frozen model" in note for note in found.notes) == bool(copies)


def test_teacher_of_another_size_is_held_and_multiplied_to_its_depth(tmp_path):
    """A teacher's layers repeat, so its work is a straight line in their number, and its memory is its weights'."""
    flops, peaks = [], []
    for layers in (3, 6, 9):
        config_of("llama", num_hidden_layers=layers, hidden_size=96).save_pretrained(tmp_path / str(layers))
        request = asked("distill", keys={"teacher": tmp_path / str(layers)}, precision="bf16")
        tape = trace(request, H200, evaluating=False).tape
        flops.append(sum(segment.cost.flops for segment in tape.segments))
        peaks.append(max(peak_bytes(tape, name) for name in ("activations", "logits")))
    assert flops[2] - flops[1] == pytest.approx(flops[1] - flops[0], rel=1e-6) and flops[1] > flops[0]
    assert len(set(peaks)) == 1
    assert held("distill", keys={"teacher": tmp_path / "9"}) > held("distill", keys={"teacher": tmp_path / "6"})


def test_teacher_with_another_vocabulary_is_refused(tmp_path):
    config_of("llama", vocab_size=512).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"vocabulary of 512, but llama has 1024; name a teacher"):
        estimated("distill", keys={"teacher": tmp_path})


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_adapters_need_less_than_the_whole_model(objective):
    full, lora = estimated(objective, batch=2), estimated(objective, batch=2, lora_rank=4)
    assert lora.peak_allocated_bytes < full.peak_allocated_bytes
    assert lora.components["optimizer"] < full.components["optimizer"]


@pytest.mark.parametrize("objective", ALL)
def test_four_bit_weights_need_no_second_copy_and_a_note_says_what_is_not_measured(objective):
    keys = {"beta": 0.1} if objective == "grpo" else {}
    shape = {"hidden_size": 512, "intermediate_size": 1024}
    dense, four_bits = (
        estimated(objective, keys=keys, lora_rank=4, precision="bf16", shape=shape, **more)
        for more in ({}, {"quantized": True})
    )
    assert four_bits.components["weights"] < dense.components["weights"]
    assert four_bits.components["optimizer"] == dense.components["optimizer"]
    assert any("No GPU has measured this objective over 4-bit weights" in note for note in four_bits.notes)
    assert len(asked(objective, keys=keys, lora_rank=4, quantized=True).frozen()) == (objective == "distill")


def test_reference_pass_over_four_bit_weights_costs_what_it_costs_beside_dense_ones():
    """ORPO has no reference. Both references take the policy's products, with a scaling of 0."""

    def reference_flops(**more: Any) -> float:
        dpo, orpo = (
            sum(segment.cost.flops for segment in trace(one, H200, evaluating=False).tape.segments)
            for one in (asked(name, lora_rank=64, precision="bf16", **more) for name in ("dpo", "orpo"))
        )
        return dpo - orpo

    assert reference_flops(quantized=True) == pytest.approx(reference_flops(), rel=1e-3)


def test_adapters_in_bf16_halve_their_states():
    wide, narrow = (
        model_weights(asked("dpo", lora_rank=4, precision="amp-bf16", **{"lora.adapter_dtype": dtype}))
        for dtype in ("fp32", "bf16")
    )
    sizes = [sum(weight.numel * weight.itemsize for weight in one.trained) for one in (wide, narrow)]
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_shared_prefix_keeps_and_computes_the_tokens_of_the_row(checkpointing):
    """Eight completions of two prompts: 2 x (255 + 4 x 33) tokens instead of 8 x 288. Padded attention needs a mask."""
    keys, more = {"generations": 4}, {"batch": 8, "seq": 256, "precision": "bf16", "checkpointing": checkpointing}
    padded, row = (
        trace(asked("grpo", keys={**keys, "shared_prefix": shared}, **more), H200, evaluating=False).tape
        for shared in (False, True)
    )
    share = 2 * (255 + 4 * 33) / (8 * 288)
    name = "checkpoints" if checkpointing == "full" else "activations"
    assert 0.7 * share < peak_bytes(row, name) / peak_bytes(padded, name) < 1.05 * share
    flops = [sum(segment.cost.flops for segment in tape.segments) for tape in (row, padded)]
    assert flops[0] / flops[1] < 1.3 * share
    assert live_peak(row) < 0.6 * live_peak(padded)


def test_largest_group_that_fits_grows_with_a_shared_prefix():
    more = {"batch": 16, "seq": 448, "precision": "bf16"}
    padded, shared = (
        estimated("grpo", keys={"generations": 16, "shared_prefix": shared}, **more) for shared in (False, True)
    )
    larger = estimated("grpo", keys={"generations": 48, "shared_prefix": True}, **{**more, "batch": 48})
    assert shared.peak_allocated_bytes < larger.peak_allocated_bytes < padded.peak_allocated_bytes


def test_shared_prefix_of_pairs_is_planned_as_an_upper_bound_and_a_note_says_so():
    plain, shared = (estimated("dpo", keys={"shared_prefix": shared}) for shared in (False, True))
    assert shared.peak_allocated_bytes == plain.peak_allocated_bytes
    assert any("upper bounds" in note for note in shared.notes) and shared.notes != plain.notes


@pytest.mark.parametrize(("objective", "share"), [("dpo", 1.0), ("orpo", 1.0), ("reward", 0.99)])
def test_pairs_keep_the_activations_of_twice_the_samples(objective, share):
    """A reward model has no labels, whose ids are 8 bytes per token."""
    own = trace(asked(objective, batch=3), H200, evaluating=False).tape
    single = trace(request_of(batch=6, masked=True), H200, evaluating=False).tape
    assert share <= peak_bytes(own, "activations") / peak_bytes(single, "activations") < 1.2


@pytest.mark.parametrize("objective", ALL)
def test_logits_are_never_held(objective):
    vocab, batch, seq = 128_256, 8, 1024
    shape = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 2048}
    keys = {"completion_length": 1024} if objective in ("grpo", "distill") else {}
    request = asked(objective, keys=keys, batch=batch, seq=seq, precision="bf16", shape=shape)
    tape = trace(request, H200, evaluating=False).tape
    assert 2 * vocab * batch * seq > 1 << 30, "more than a head keeps for its backward pass"
    assert peak_bytes(tape, "logits") < 2 * vocab * batch * seq


def test_checkpointing_keeps_the_layers_inputs_of_the_trained_pass_alone():
    request = asked("dpo", batch=2, seq=64, checkpointing="full", precision="bf16")
    tape = trace(request, H200, evaluating=False).tape
    kept = [size for size, name in zip(tape.sizes, tape.components, strict=True) if name == "checkpoints"]
    assert kept == [2 * 2 * 64 * 64 * 2] * 5


def test_kto_without_its_kl_term_makes_half_of_the_passes():
    with_kl, without = asked("kto"), asked("kto", keys={"loss_type": "apo_zero_unpaired"})
    assert (with_kl.tokens, without.tokens) == (2 * 2 * 64, 2 * 64)
    flops = [
        sum(segment.cost.flops for segment in trace(one, H200, evaluating=False).tape.segments)
        for one in (with_kl, without)
    ]
    assert flops[0] > 1.3 * flops[1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_cache_of_generation_is_that_of_the_model(family):
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    config, tokens, batch = config_of(family), 48, 2
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.ones(batch, tokens, dtype=torch.long), use_cache=True, **{cache_argument(model.forward): cache})
    real = [(layer.keys.numel(), layer.values.numel()) for layer in cache.layers]
    assert real == [(batch * keys, batch * values) for keys, values in kv_widths(config, tokens)]


def test_completions_of_the_whole_step_are_written_at_once():
    """With adapters and checkpointing, the cache of long completions is the most that a step holds."""
    more = {"lora_rank": 4, "checkpointing": "full", "precision": "bf16", "seq": 16, "batch": 2}
    shape = {"max_position_embeddings": 4096, "num_hidden_layers": 40}
    keys = {"completion_length": 480, "generator": "transformers"}
    peaks = [estimated("grpo", keys=keys, shape=shape, accumulate=n, **more).phases["forward"] for n in (16, 32)]
    cache = 2 * sum(map(sum, kv_widths(config_of("llama", **shape), 496))) * 2
    assert peaks[1] - peaks[0] >= 16 * cache > 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"precision": "bf16"}, None),
        ({"precision": "amp-bf16"}, None),
        (
            {"precision": "amp-bf16", "zero": 2, "gpus": 2, "offload": "cpu"},
            "because of states in host memory; sharding.offload: none uses tigon's generator",
        ),
    ],
)
def test_plan_says_why_transformers_writes_the_completions_and_counts_that(more, says):
    shape = {"max_position_embeddings": 4096, "num_hidden_layers": 40}
    more = {**more, "shape": shape, "seq": 2048, "batch": 8, "accumulate": 8, "lora_rank": 4, "checkpointing": "full"}
    found = estimated("grpo", keys={"completion_length": 16}, **more)
    (note,) = (note for note in found.notes if note.startswith("Completions"))
    writer = f"transformers' generate, {says}" if says else "tigon's generator"
    assert note.startswith(f"Completions: {writer}. At full length they take ")
    by_transformers = estimated("grpo", keys={"completion_length": 16, "generator": "transformers"}, **more)
    assert (found.phases["forward"] == by_transformers.phases["forward"]) == (says is not None)


@pytest.mark.parametrize(
    "keys",
    [
        {"lora.base_offload": True},
        {"sharding.zero": 2, "sharding.offload": "cpu"},
        {"sharding.fsdp": True, "lora.rank": 4, "lora.quantize": True},
        {"sharding.zero": 3, "lora.rank": 4, "lora.quantize": True},
    ],
    ids=str,
)
def test_plan_refuses_the_generator_with_what_the_run_refuses(keys):
    chosen = planned("grpo", generator="tigon")
    reasons = chosen.refusals(Settings.of({"train.precision": "bf16", **keys}))
    assert any("post_training.generator: tigon does not go with" in reason for reason in reasons)
    for fine in ({}, {"sharding.fsdp": True}, {"sharding.zero": 3}, {"sharding.zero": 1}):
        assert not chosen.refusals(Settings.of({"train.precision": "bf16", **fine})), fine


def test_completions_beyond_the_rows_of_the_generator_take_no_more_memory():
    more = {"lora_rank": 4, "checkpointing": "full", "precision": "bf16", "seq": 2048, "batch": 8}
    shape = {"max_position_embeddings": 4096, "num_hidden_layers": 40}
    keys = {"completion_length": 16, "generations": 8, "generator": "tigon"}
    peaks = [estimated("grpo", keys=keys, shape=shape, accumulate=n, **more).phases["forward"] for n in (32, 64, 128)]
    per_token = 2 * sum(map(sum, kv_widths(config_of("llama", **shape), 1)))
    assert peaks[2] == peaks[1]
    assert peaks[1] - peaks[0] == 32 * 2048 * per_token, (
        "of 64 prompts, so that a prompt waits for the last of its group"
    )


def test_generator_holds_the_prompt_of_a_group_once():
    more = {"lora_rank": 4, "checkpointing": "full", "precision": "bf16", "seq": 2048, "batch": 8}
    shape = {"max_position_embeddings": 4096, "num_hidden_layers": 40}
    peaks = {}
    for generator in ("tigon", "auto", "transformers"):
        keys = {"completion_length": 16, "generations": 8, "generator": generator}
        peaks[generator] = estimated("grpo", keys=keys, shape=shape, accumulate=8, **more).phases["forward"]
    per_token = 2 * sum(map(sum, kv_widths(config_of("llama", **shape), 1)))
    assert peaks["auto"] == peaks["tigon"]
    assert peaks["transformers"] - peaks["tigon"] > 0.8 * (64 - 8) * 2048 * per_token
    assert peaks["tigon"] > 8 * 2048 * per_token


def test_pool_of_the_generator_counts_the_widths_of_each_layer():
    """Global layers of Gemma 4 have keys and values of another width than the first layer."""
    config = AutoConfig.for_model("gemma4_text", **GEMMA_4)
    more = {"lora_rank": 4, "checkpointing": "full", "precision": "bf16", "seq": 2048, "batch": 8}
    request = asked("grpo", keys={"completion_length": 16, "generator": "tigon"}, accumulate=8, **more)
    request = dataclasses.replace(request, model="gemma4", config=config)
    ledger = Ledger()
    generate(ledger, request, model_weights(request))
    widths = [sum(each) for each in kv_widths(config, 1)]
    tokens = 32 * 2032 + 64 * 16  # generations: 2
    assert widths[-1] > widths[0]
    assert ledger.peaks["forward"]["activations"] == pytest.approx(2 * tokens * sum(widths), rel=0.02)


# --- the time of completions ------------------------------------------------------------------------------------------


def qwen3_4b() -> Any:
    """The shape that `benchmarks.cases.generation` measured."""
    shape = {**PRESETS["qwen3-8b"], **QWEN3_4B, "tie_word_embeddings": True}
    return AutoConfig.for_model(**shape)


def completions_of_4b(prompts: int, per_prompt: int, generator: str = "tigon", **more: Any) -> float:
    """Planned seconds of completions of 256 tokens after 1,024, with LoRA of rank 16 on an H200."""
    request = asked("grpo", keys={"completion_length": 256, "generator": generator}, lora_rank=16, seq=1024, **more)
    objective = dataclasses.replace(request.objective, generations=per_prompt)
    request = dataclasses.replace(
        request, model="qwen3-4b", config=qwen3_4b(), objective=objective, batch=prompts * per_prompt
    )
    weights = model_weights(request)
    written = generate(Ledger(), request, weights)
    assert written is not None and written.by_generator == (generator == "tigon")
    return completions_s(written, request, H200, weights)


def measured_seconds(line: str) -> float:
    """Of benchmarks/results/nvidia-h200/post-training/generation.json."""
    record = json.loads((RECORDS / "generation.json").read_text(encoding="utf-8"))
    (found,) = (one["seconds"] for one in record["measurements"] if one["writes"] == line)
    return float(found)


@pytest.mark.parametrize(
    ("line", "prompts", "per_prompt", "precision"),
    [
        ("generator, patched layers", 8, 8, "bf16"),
        ("generator, patched layers, 1 row", 1, 1, "bf16"),
        ("generator, patched layers, fp32 adapters under autocast", 8, 8, "amp-bf16"),
    ],
)
def test_time_of_the_generator_is_within_a_tenth_of_the_record(line, prompts, per_prompt, precision):
    planned_s = completions_of_4b(prompts, per_prompt, precision=precision)
    assert planned_s == pytest.approx(measured_seconds(line), rel=0.1)


def test_time_of_transformers_is_between_its_two_recorded_steps():
    """The two steps differ by 1.7, because their hosts' speed did."""
    record = json.loads((RECORDS / "grpo-step.json").read_text(encoding="utf-8"))
    steps = [step["completions_s"] for step in record["measurements"][1]["steps"]]
    assert min(steps) < completions_of_4b(8, 8, "transformers", precision="amp-bf16") < 1.05 * max(steps)


def test_whole_step_of_the_recorded_grpo_is_within_a_tenth():
    """The last step. The first timed one took 1.4 times as long, for its update."""
    record = json.loads((RECORDS / "grpo-step.json").read_text(encoding="utf-8"))
    last = record["measurements"][0]["steps"][-1]
    request = asked(
        "grpo", keys={"completion_length": 256, "generations": 8, "shared_prefix": True}, lora_rank=16, seq=1024,
        batch=64, precision="amp-bf16", checkpointing="full",
    )  # fmt: skip
    found = estimate(dataclasses.replace(request, model="qwen3-4b", config=qwen3_4b()), gpu=H200)
    assert found.step_s == pytest.approx(last["seconds"], rel=0.1)
    assert found.completions_s == pytest.approx(last["completions_s"], rel=0.1)


@pytest.mark.parametrize("row", range(4))
def test_recorded_steps_on_two_gpus_are_within_a_tenth(row):
    """With the host time of the H100's row, as the CPU-bound steps of these hosts had. FSDP2's with the generator was
    planned before it ran."""
    record = json.loads((RECORDS / "grpo-two-gpus.json").read_text(encoding="utf-8"))["rows"][row]
    keys = {"completion_length": 64, "generations": 8}
    keys |= {"generator": "transformers"} if record["completions"] == "transformers' generate" else {}
    engines = {"DDP": {}, "FSDP2": {"fsdp": True}, "ZeRO-3": {"zero": 3}}
    request = asked(
        "grpo", keys=keys, batch=16, seq=64, precision="amp-bf16", checkpointing="full", gpus=2,
        **engines[record["name"].split(", ")[-1]],
    )  # fmt: skip
    request = dataclasses.replace(request, model="llama-3.2-1b", config=AutoConfig.for_model(**PRESETS["llama-3.2-1b"]))
    host = find_gpu("h100")
    found = estimate(request, gpu=dataclasses.replace(find_gpu("h200"), host_s=host.host_s, engine_s=host.engine_s))
    assert 1e3 * found.step_s == pytest.approx(record["ms"], rel=0.1)
    assert found.peak_allocated_bytes == pytest.approx(record["peak_bytes"], rel=0.01)


def test_steps_without_completions_take_no_time_for_them():
    assert estimated("dpo").completions_s == 0
    grpo = estimated("grpo", precision="bf16")
    assert 0 < grpo.completions_s < grpo.step_s


def test_longer_completions_take_longer_by_the_tokens():
    shape = {"max_position_embeddings": 4096}
    times = [
        estimated("grpo", keys={"completion_length": n}, shape=shape, precision="bf16").completions_s
        for n in (128, 256, 512)
    ]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=0.05) and times[1] > times[0]


def test_fsdp2_gathers_the_whole_weights_for_the_generator_and_leaves_them_where_they_do_not_fit():
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    more = {"shape": shape, "precision": "bf16", "fsdp": True, "gpus": 2, "checkpointing": "full", "batch": 2, "seq": 8}
    request, keys = asked("grpo", **more), {"generator": "transformers"}
    whole = 2 * model_weights(request).numel
    roomy = estimate(request, gpu=BARE)
    assert (
        roomy.phases["forward"] - estimate(asked("grpo", keys=keys, **more), gpu=BARE).phases["forward"] > 0.4 * whole
    )
    assert "tigon's generator. " in roomy.notes[-1] and "of gathered weights" in roomy.notes[-1]
    tight = estimate(request, gpu=small_gpu((roomy.phases["save"] + 0.9 * whole) / 2**20))
    assert "transformers' generate, because whole weights, keys and values take" in tight.notes[-1]
    assert tight.completions_s > roomy.completions_s
    required = estimate(asked("grpo", keys={"generator": "tigon"}, **more), gpu=small_gpu(64))
    assert "tigon's generator. " in required.notes[-1], "the run would end with an error, and the plan exceeds the GPU"


@pytest.mark.parametrize(
    ("option", "writer"),
    [("use_vllm", "vLLM"), ("use_transformers_continuous_batching", "transformers' continuous batching")],
)
def test_plan_names_another_writer_of_completions_and_what_it_counts_instead(option, writer):
    found = estimated("grpo", keys={"generation": f"{{{option}: true}}"}, precision="bf16")
    assert found.notes[-1].startswith(
        f"Completions: {writer} writes them. The plan counts them as transformers' generate would take them: "
    )
    filtered = estimated("grpo", keys={"generation": "{top_p: 0.9}"}, precision="bf16")
    assert "tigon's generator. At full length" in filtered.notes[-1]


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, {"fsdp": True}, {"zero": 2}, {"zero": 3}], ids=str)
def test_reference_is_divided_as_the_model_is_or_held_whole(engine):
    """The reference adds its weights to what a process holds between steps, or an engine's share of them."""
    shape = {"hidden_size": 256, "intermediate_size": 1024}
    found, alone = (
        estimated(objective, shape=shape, precision="bf16", gpus=2, **engine) for objective in ("dpo", "orpo")
    )
    (whole,) = (model_weights(one).weight_bytes for one in asked("dpo", shape=shape, precision="bf16").frozen())
    parts = 2 if engine.get("fsdp") or engine.get("zero") == 3 else 1
    # An optimizer state may take a block that loading freed, which is up to 1 MiB larger and not split.
    assert found.phases["save"] - alone.phases["save"] == pytest.approx(whole / parts, rel=0.06, abs=2**20)


# --- refusals and the search ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "settings", "words"),
    [
        ("dpo", {"kernels": "liger"}, "model.kernels: liger"),
        ("grpo", {"kernels": "none"}, "cannot predict post-training with these kernels"),
    ],
)  # fmt: skip
def test_techniques_that_do_not_go_with_post_training_are_refused(objective, settings, words):
    request = asked(objective, **settings)
    assert any(words in reason for reason in refusals(request, request.settings))


@pytest.mark.parametrize(
    ("objective", "more", "words"),
    [
        ("kto", {"batch": 1}, "batch is 1, but kto estimates its KL term"),
        ("grpo", {"batch": 3}, "3 samples have to be a multiple of generations, 2"),
        ("grpo", {"seq": 500}, "completions have up to 32 tokens, but llama has max_position_embeddings 512"),
    ],
)
def test_batches_and_lengths_that_no_run_takes_are_refused(objective, more, words):
    with pytest.raises(UsageError, match=words):
        estimated(objective, **more)


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "reward"])
def test_recommended_recipe_lacks_only_the_users_rows(objective, tmp_path):
    keys = {} if objective == "reward" else {"beta": 0.2}
    request = dataclasses.replace(asked(objective, keys=keys), model="tigon-demo")
    (tmp_path / "plan.yaml").write_text(as_recipe.yaml_text(request), encoding="utf-8")
    chosen = recipe_checks.load(tmp_path / "plan.yaml", ["data.source=toy-answers"], gpu_present=lambda: True)
    assert chosen.train.objective == objective and chosen.post_training.beta == keys.get("beta")
    assert not chosen.data.cross_document_attention


def test_micro_batches_of_the_search_hold_whole_groups_of_completions():
    request = asked("grpo", keys={"generations": 4}, batch=16)
    problem = SearchProblem(request=request, free=frozenset({"train.gradient_accumulation"}), gpu=H200)
    assert [size for size, _ in space.splits(problem)] == [16, 8, 4]
    kto = dataclasses.replace(problem, request=asked("kto", batch=6))
    assert [size for size, _ in space.splits(kto)] == [6, 3, 2]


def test_run_that_does_not_fit_is_told_before_it_starts(monkeypatch):
    pytest.importorskip("trl")
    from tigon.trainer import model
    from tigon.trainer.guards import prediction

    path = Path(__file__).parents[2] / "recipes" / "objectives" / "dpo.yaml"
    words = ["train.batch_size=32", "train.optimizer=sgd", "train.precision=bf16", "train.checkpointing=none"]
    recipe = recipe_checks.load(path, words, gpu_present=lambda: False)
    config = model.load_config(recipe.model)
    settings = recipe.settings()
    found = prediction.predict(recipe, config, settings, small_gpu(60), evaluated=True)
    assert found.option.request.masked and found.option.request.objective.sequences(1) == 2
    _, warning, *_ = [*found.lines("tigon train dpo.yaml"), ""]
    assert "it will run out of memory" in warning, found.option.estimate.device_bytes >> 20
    assert "This fits:" in warning and "tigon train dpo.yaml --set train." in warning


# --- beside a real step -----------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 64, "num_hidden_layers": 4}
BATCH, TOKENS = 4, 72
COLUMNS = {
    "dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion", "label"),
    "orpo": ("prompt", "chosen", "rejected"), "reward": ("prompt", "chosen", "rejected"), "grpo": ("prompt",),
    "distill": ("prompt",),
}  # fmt: skip
NAMES = {"dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "reward": "Reward", "grpo": "GRPO", "distill": "Distillation"}


def words(count: int, seed: int) -> str:
    ids = torch.randint(5, 64, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def rows(objective: str) -> list[dict[str, Any]]:
    prompt = TOKENS - COMPLETION if "completion" not in COLUMNS[objective] and len(COLUMNS[objective]) == 1 else 2
    return [
        {
            name: value
            for name, value in {
                "prompt": words(prompt, i), "chosen": f" {words(TOKENS, i + 50)}", "rejected": f" {words(TOKENS, i)}",
                "completion": f" {words(TOKENS, i + 7)}", "label": i % 2 == 0,
            }.items()
            if name in COLUMNS[objective]
        }
        for i in range(BATCH)
    ]  # fmt: skip


def small_model(precision: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = config_of("llama", **SHAPE)
    config.use_cache, config.bos_token_id, config.eos_token_id, config.pad_token_id = False, 1, 2, 0
    dtype = weight_dtype(Settings.of({"train.precision": precision}), trained=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def trl_trainer(objective: str, precision: str, folder: Path) -> Any:
    """TRL's trainer with tigon's head, as a run makes it."""
    datasets = pytest.importorskip("datasets")
    from tests.integrations.trl_runs import reward, tokenizer
    from tigon.integrations.trl import fuse

    package = importlib.import_module("trl.experimental.orpo" if objective == "orpo" else "trl")
    writes = objective in ("grpo", "distill")
    options = {"max_completion_length": COMPLETION} if writes else {"max_length": 512}
    more: dict[str, Callable[[], Any]] = {
        "dpo": lambda: {"ref_model": small_model(precision).requires_grad_(False).eval()},
        "kto": lambda: {"ref_model": small_model(precision).requires_grad_(False).eval()},
        "distill": lambda: {"teacher_model": small_model(precision).requires_grad_(False).eval()},
        "grpo": lambda: {"reward_funcs": reward},
    }
    args = getattr(package, f"{NAMES[objective]}Config")(
        output_dir=str(folder), per_device_train_batch_size=BATCH, use_cpu=True, bf16=precision == "amp-bf16",
        gradient_checkpointing=False, report_to=[], disable_tqdm=True, **options,
        **({"num_generations": 2} if objective == "grpo" else {}),
    )  # fmt: skip
    model = small_model(precision)
    if objective == "reward":
        model = with_score(model)
        model.config.pad_token_id = 0
    trainer = getattr(package, f"{NAMES[objective]}Trainer")(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(rows(objective)),
        processing_class=tokenizer(), **more.get(objective, dict)(),
    )  # fmt: skip
    if objective != "reward":
        assert not fuse(trainer).unfused
    return trainer


def live_peak(tape: Tape) -> int:
    """The most bytes of a recording that are alive at one time."""
    live = peak = 0
    for event in (event for segment in tape.segments for event in segment.events):
        live += tape.sizes[event] if event >= 0 else -tape.sizes[~event]
        peak = max(peak, live)
    return peak


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("objective", "precision", "tolerance"),
    [
        ("dpo", "amp-bf16", 0.02), ("kto", "amp-bf16", 0.02), ("orpo", "fp32", 0.01),
        ("grpo", "amp-bf16", 0.01), ("distill", "amp-bf16", 0.01), ("reward", "fp32", 0.01),
    ],
)  # fmt: skip
def test_traced_step_has_the_peak_of_trls(objective, precision, tolerance, tmp_path):
    """Both with eager attention and no kernels in the layers. The lists of autocast and the buffers of the head differ
    between the CPU and CUDA, for which the trace plans."""
    pytest.importorskip("trl")
    trainer = trl_trainer(objective, precision, tmp_path)
    model = trainer.accelerator.prepare_model(trainer.model)
    trainer.model_wrapped, trainer.current_gradient_accumulation_steps = model, 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    model.train()
    meter = PeakMeter(torch.device("cpu"))
    meter.start(training_state(model, torch.optim.SGD(model.parameters())))
    trainer.compute_loss(model, inputs).backward()
    measured = meter.stop().step_bytes + storage_bytes(tensors.values())

    seq = max(t.shape[-1] for name, t in tensors.items() if name.endswith(("input_ids", "prompt_ids")))
    keys = {"completion_length": tensors["completion_ids"].shape[1]} if "completion_ids" in tensors else {}
    request = asked(
        objective, keys=keys, batch=BATCH, seq=seq, kernels="none", attention="eager", precision=precision, shape=SHAPE
    )
    assert live_peak(trace(request, BARE, evaluating=False).tape) == pytest.approx(measured, rel=tolerance)


def test_reward_model_has_a_score_in_place_of_the_head():
    request = asked("reward", shape={"tie_word_embeddings": False})
    names = {weight.name: weight.numel for weight in model_weights(request).weights}
    assert names["score.weight"] == 64 and not any("lm_head" in name for name in names)
    assert sum(names.values()) == sum(p.numel() for p in build("llama", request.config).parameters()) - 1024 * 64 + 64
