"""TRL's trainers with and without shared prefixes log and learn the same numbers."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from trl_cases import lora, of
from trl_runs import FUSED_FORWARD_SINCE, build, compare, four_bits, model, train, trl_version

import tigon.integrations.trl as integration
from second_proofs import proved_by
from tigon.integrations.trl import shared_prefix
from tigon.integrations.trl.prefix_layout import layout_of
from tigon.integrations.trl.shared_prompts import shuffled_by_prompt
from tigon.models.table import MODELS
from tigon.models.verification.small_models import small_model

pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(trl_version() < FUSED_FORWARD_SINCE, reason="needs TRL's forward with shift_labels"),
]

QLORA = {"lora": lora(), "policy": lambda: four_bits(torch.float32)}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
ONE_ROW = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO": ("DPO", {"evaluate": True}),
    "DPO-LoRA": ("DPO", {"lora": lora()}),
    "DPO-QLoRA": ("DPO", QLORA),
    "DPO-checkpointing": ("DPO", {"gradient_checkpointing": True}),
    "DPO-reentrant-checkpointing": ("DPO", REENTRANT),
    "DPO-window": ("DPO", {"policy": of("mistral", sliding_window=4)}),
    "DPO-learned-positions": ("DPO", {"policy": of("gpt2", n_embd=32, n_layer=2, n_head=4, n_inner=48)}),
    "GRPO": ("GRPO", {}),
    "GRPO-LoRA": ("GRPO", {"lora": lora()}),
    "GRPO-one-row-of-a-group": ("GRPO", ONE_ROW),
    "RLOO": ("RLOO", {}),
    "KTO": ("KTO", {"data": "unpaired of one prompt", "per_device_train_batch_size": 4}),
    "ORPO": ("ORPO", {}),
    "CPO": ("CPO", {}),
    "Reward": ("Reward", {}),
    "Reward-LoRA": ("Reward", {"lora": lora(task_type="SEQ_CLS")}),
}
SHARE_CODE = ("GRPO-LoRA", "RLOO", "CPO", "Reward-LoRA", "DPO-checkpointing")


def without_mean_logits(result: Any) -> Any:
    """ORPO and CPO log the mean logits of padding too."""
    logs = [{name: value for name, value in entry.items() if "logits" not in name} for entry in result.logs]
    result.logs[:] = logs
    return result


@pytest.mark.parametrize(
    "name", proved_by(lambda name: name not in SHARE_CODE, list(CASES), "another case runs the same code")
)
def test_shared_prefix_logs_and_learns_what_the_padded_batch_does(name: str) -> None:
    trainer, options = CASES[name]
    if "QLoRA" in name:
        pytest.importorskip("bitsandbytes")
    want = train(trainer, fused=trainer != "Reward", **options)
    got = train(trainer, fused=True, shared_prefix=True, **options)
    if trainer in ("ORPO", "CPO"):
        got, want = without_mean_logits(got), without_mean_logits(want)
    if options is not ONE_ROW:
        assert got.shared.computed < got.shared.given
    compare(got, want, 1e-3 if "QLoRA" in name else 1e-4)


REFUSED = {
    "gemma2": "not one that sdpa computes",
    "gpt_oss": "not one that sdpa computes",
    "llama4_text": "takes no such row",
    "qwen3_next": "gives other results",
    "falcon_h1": "gives other results",
}


@pytest.mark.parametrize(
    "family",
    proved_by(
        lambda family: family in {*REFUSED, "gemma3_text", "cohere2", "deepseek_v3", "gpt_neox"} - {"qwen3_next"},
        list(MODELS),
        "another family shares the code of its attention",
    ),
)
def test_small_model_of_a_family_computes_the_same_or_is_refused(family: str) -> None:
    reason = shared_prefix.family_objection(family)
    assert (reason is None) == (family not in REFUSED), reason
    assert REFUSED.get(family, "") in (reason or "")


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", {"_attn_implementation": "eager"}, "its attention is eager, and this takes sdpa"),
        ("llama", {"attention_dropout": 0.1}, "its attention has dropout 0.1"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits=False"),
        ("falcon_h1", {}, "carry a state from one token to the next"),
        ("qwen2_5_vl", {}, "several positions"),
    ],
)
def test_model_that_cannot_share_prefixes_is_refused_with_the_reason(
    family: str, change: dict[str, Any], words: str
) -> None:
    made: Any = small_model(family)[0]
    for name, value in {"_attn_implementation": "sdpa", **change}.items():
        setattr(made.config, name, value)
    assert words in str(shared_prefix.model_objection(made))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("family", "tolerance"), [("starcoder2", 1e-11), ("mistral", 2e-5), ("qwen3", 2e-5)])
def test_hidden_states_and_gradients_in_fp64_are_those_of_the_padded_batch(
    family: str, tolerance: float, adapted: bool
) -> None:
    """Nothing but the order of sums differs. RMS norms of transformers round to fp32, and Starcoder2's norms do not."""
    peft = pytest.importorskip("peft")
    policy = model(family, **({} if family == "qwen3" else {"sliding_window": 4})).double()
    if adapted:
        peft.get_peft_model(policy, lora(init_lora_weights=False, target_modules=["q_proj", "o_proj"])()).double()
    shared = shared_prefix.SharedPrefix(policy)
    ids, mask = batch([5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 12], [20, 21, 22], [20, 21, 23, 24, 25], [5, 6, 7, 8, 12])
    layout = layout_of(ids, mask)
    assert layout is not None
    padded = policy.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    row = shared.hidden_states(layout, ids)[layout.place_BT].view(padded.shape)
    upstream = torch.randn(padded.shape, dtype=torch.float64) * mask[..., None]
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    want, got = (torch.autograd.grad(hidden, trained, upstream) for hidden in (padded, row))
    for theirs, ours in [(padded * mask[..., None], row * mask[..., None]), *zip(want, got, strict=True)]:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


def test_reason_is_reported_and_the_trainer_runs_padded() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = train("DPO", fused=True, shared_prefix=True, policy=of("llama", attention_dropout=0.5))
    assert "its attention has dropout 0.5" in got.unfused["shared_prefix"] and got.shared is None
    said = [str(w.message) for w in caught if issubclass(w.category, integration.UnfusedWarning)]
    assert len(said) == 1 and "shared_prefix: its attention has dropout" in said[0]


def test_batch_without_a_common_beginning_runs_padded_and_one_warning_says_so() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = train("KTO", fused=True, shared_prefix=True)
    said = [str(w.message) for w in caught if issubclass(w.category, integration.UnfusedWarning)]
    assert got.shared.given == 0 and len(said) == 1 and "begin with the same tokens" in said[0]


def test_restore_gives_attention_and_methods_back() -> None:
    trainer = build("GRPO")
    before = trainer.model.config._attn_implementation
    report = integration.fuse(trainer, shared_prefix=True)
    assert trainer.model.config._attn_implementation == shared_prefix.NAME and "shared prefix: " in str(report)
    report.restore()
    assert trainer.model.config._attn_implementation == before and "_prepare_inputs" not in vars(trainer)


def test_second_call_adds_shared_prefixes_to_a_fused_trainer() -> None:
    trainer = build("DPO")
    first = integration.fuse(trainer)
    assert first.shared_prompts is None
    assert integration.fuse(trainer, shared_prefix=True) is first and first.shared_prompts is not None


# --- the layout ------------------------------------------------------------------------------------------------------


def batch(*rows: list[int], left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in rows])
    return ids, (ids != 0).long()


@pytest.mark.parametrize("left", [False, True])
def test_row_holds_every_token_of_the_batch_at_its_position(left: bool) -> None:
    ids, mask = batch([1, 2, 3, 4, 5], [9, 8], [1, 2, 3, 6], [1, 2, 3, 4, 7, 7], left=left)
    layout = layout_of(ids, mask)
    assert layout is not None and layout.tokens == 2 + 2 + 3 + 2 + 4 and layout.row.given == 17
    assert torch.equal(layout.padded(layout.take(ids), ids.shape) * mask, ids)
    positions = torch.arange(ids.shape[1]).expand_as(ids) - (mask.cumsum(1) == 0).sum(1, keepdim=True)
    offsets = layout.padded(layout.positions_N[None], ids.shape) - positions
    for offset, seen in zip(offsets, mask.bool(), strict=True):
        assert len(offset[seen].unique()) == 1


def test_groups_are_those_that_save_the_most_tokens() -> None:
    """All sequences begin with 1 2 3, but two prompts of eight tokens save more than one of three."""
    first, second = [1, 2, 3, 4, 4, 4, 4, 4], [1, 2, 3, 5, 5, 5, 5, 5]
    layout = layout_of(*batch([*first, 6], [*second, 6], [*first, 7], [*second, 7]))
    assert layout is not None and [group.prefix for group in layout.row.groups] == [7, 7]
    layout = layout_of(*batch([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]))
    assert layout is not None and [group.prefix for group in layout.row.groups] == [2]


def test_batch_with_padding_between_tokens_has_no_layout() -> None:
    ids, mask = batch([1, 2, 3, 4], [1, 2, 3, 4])
    assert layout_of(ids, mask) is not None
    mask[:, 1] = 0
    assert layout_of(ids, mask) is None


def test_layout_is_kept_until_the_batch_changes_or_is_gone() -> None:
    ids, mask = batch([1, 2, 3, 4], [1, 2, 3, 5])
    layout = layout_of(ids, mask)
    assert layout is not None and layout_of(ids, mask) is layout
    assert layout_of(ids, mask.clone()) is not layout and layout_of(ids, None) is not layout
    ids[1, 2] = 7
    changed = layout_of(ids, mask)
    assert changed is not None and [group.prefix for group in changed.row.groups] == [1]
    gone = weakref.ref(changed)
    del ids, changed
    assert gone() is None


def test_layout_is_made_in_inference_mode_too() -> None:
    with torch.inference_mode():
        ids, mask = batch([1, 2, 3, 4], [1, 2, 3, 5])
        assert layout_of(ids, mask) is not None
        ids[1, 1] = 9
        assert layout_of(ids, mask) is None


def test_layout_made_in_inference_mode_is_not_kept_for_training() -> None:
    ids, mask = batch([1, 2, 3, 4], [1, 2, 3, 5])
    with torch.inference_mode():
        assert layout_of(ids, mask) is not None
    layout = layout_of(ids, mask)
    assert layout is not None and not layout.place_BT.is_inference()


def test_completions_of_a_prompt_stay_together_in_a_shuffled_order() -> None:
    prompts = torch.tensor([[1], [1], [2], [2], [3], [3]]).repeat(1, 2)
    rows = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "n": list(range(6)),
        "scalar": torch.tensor(7),
    }
    torch.manual_seed(0)
    orders = [shuffled_by_prompt(rows) for _ in range(20)]
    assert len({tuple(each["n"]) for each in orders}) > 5
    for each in orders:
        assert sorted(each["n"]) == list(range(6)) and int(each["scalar"]) == 7
        assert each["prompt_ids"][:, 0].tolist() == [n // 2 + 1 for n in each["n"]]
        assert len(each["prompt_ids"][:, 0].unique_consecutive()) == 3
