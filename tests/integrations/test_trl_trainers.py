"""Every row of the table of docs/trainers.md: TRL's trainer with and without tigon's head gives the same numbers."""

from __future__ import annotations

import gc
import importlib
import warnings
from typing import Any

import pytest
import torch
from trainers_page import PAGE, render
from trl_cases import EVERY, FUSED, READS_LOGITS, REFUSED, SKIPPED, Case, cases_of_this_trl, lora
from trl_runs import FUSED_FORWARD_SINCE, build, compare, four_bits, train, trl_version

import tigon
import tigon.integrations.trl as integration
from second_proofs import proved_by
from tigon import ops
from tigon.models.patch import unwrap

pytest.importorskip("trl", reason="trl is not installed (pip install -e '.[dev]')")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_little_garbage() -> Any:
    """Trainer collects garbage after every run. Without the objects of the imported packages that takes no time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for trainer in ("SFT", "ORPO", "GRPO"):
        build(trainer)  # imports
    gc.collect()
    gc.freeze()
    yield
    torch.set_num_threads(before)


class Calls:
    """Counts the calls of tigon's ops, and fails on a call of TRL's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tigon = 0
        for name in ("linear_logprobs", "linear_kl"):
            monkeypatch.setattr(ops, name, self._counted(getattr(ops, name)))

    def _counted(self, op: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tigon += 1
            return op(*args, **kwargs)

        return counted


TRLS_FUNCTIONS = {
    "trl.kernels.chunked_logprob": ("ChunkedLogProbFunction", "apply"),
    "trl.kernels.chunked_divergence": ("ChunkedDivergenceFunction", "apply"),
    "trl.trainer.utils": ("_ChunkedLogProbFunction", "apply"),  # TRL 1.8 to 1.14
    "trl.trainer.sft_trainer": ("_chunked_cross_entropy_loss",),  # TRL 1.8 to 1.14
}
"""module -> names, of the functions that compute log-probabilities in a version of TRL"""


def forbid_trls_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: Any, **__: Any) -> Any:
        raise AssertionError("TRL's own function was called")

    forbidden = 0
    for module, (*parents, name) in TRLS_FUNCTIONS.items():
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for parent in parents:
            owner = getattr(owner, parent, None)
        if hasattr(owner, name):
            monkeypatch.setattr(owner, name, called)
            forbidden += 1
    assert forbidden, "the functions of this TRL have other names"


ALWAYS = ("full training",)
"""Options of `EVERY` that `make test` runs with every trainer, because each trainer reads the head in its own way."""
WITH_EACH_OPTION = ("SFT", "DPO", "Distillation")
"""A trainer for each head request: token metrics, log-probabilities, divergence."""


def proves_first(case: Case) -> bool:
    return case.option not in EVERY or case.option in ALWAYS or case.trainer in WITH_EACH_OPTION


@pytest.mark.parametrize(
    "case",
    proved_by(
        proves_first,
        cases_of_this_trl(),
        "the option changes the head, and another trainer asks the same of it",
        lambda case: case.id,
    ),
)
def test_fused_trainer_logs_and_learns_what_trl_alone_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.state == SKIPPED:
        pytest.skip(case.reason)
    if case.state == REFUSED:
        with pytest.raises(ValueError, match=case.reason):
            train(case.trainer, fused=False, **case.options)
        return
    if "QLoRA" in case.option:
        pytest.importorskip("bitsandbytes")
    want = train(case.trainer, fused=False, **case.options)
    calls = Calls(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as forbidden:
            forbid = (lambda _: forbid_trls_functions(forbidden)) if case.state == FUSED else None
            got = train(case.trainer, fused=True, before=forbid, **case.options)
    said = [str(w.message) for w in caught if issubclass(w.category, integration.UnfusedWarning)]
    compare(got, want, case.tolerance)
    if case.state == FUSED:
        assert got.fused and calls.tigon > 0
        assert not said or case.trainer == "GKD"
    else:
        assert len(said) == 1 and case.reason in said[0]


PATCHED: dict[tuple[str, str], dict[str, Any]] = {
    (trainer, weights): {} if weights == "full" else {"lora": lora(init_lora_weights=False)}
    for trainer in ("SFT", "DPO", "KTO", "GRPO", "GKD")
    for weights in ("full", "LoRA")
} | {
    (trainer, "QLoRA"): {"lora": lora(init_lora_weights=False), "policy": lambda: four_bits(torch.float32)}
    for trainer in ("DPO", "KTO", "GRPO", "ORPO", "Distillation")
}


@pytest.mark.parametrize(
    "row",
    proved_by(
        lambda row: row[1] == "full" or row[0] == "DPO",
        list(PATCHED),
        "each trainer is patched with full training, and DPO with adapters: its reference is the model without them",
        "-".join,
    ),
)
def test_trainer_that_is_patched_and_fused_logs_and_learns_what_trl_alone_does(
    row: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both lines of the page: tigon's layers under TRL's trainer, and tigon's head."""
    trainer, weights = row
    if weights == "QLoRA":
        pytest.importorskip("bitsandbytes")
    options, ops_of_layers = PATCHED[trainer, weights], []

    def in_fp32(built: Any) -> None:
        """TRL makes adapters of 4-bit weights bf16, and tigon leaves those to PEFT where the matmuls are fp32."""
        for weight in built.model.parameters():
            weight.data = weight.data.float() if weight.requires_grad else weight.data

    def patched(built: Any) -> None:
        in_fp32(built)
        ops_of_layers.append(tigon.patch(unwrap(built.model)).counts)
        if trainer not in READS_LOGITS or trl_version() >= FUSED_FORWARD_SINCE:
            forbid_trls_functions(forbidden)

    want = train(trainer, fused=False, before=in_fp32, **options)
    calls = Calls(monkeypatch)
    with monkeypatch.context() as forbidden:
        got = train(trainer, fused=True, before=patched, **options)
    (counts,) = ops_of_layers
    assert counts["rms_norm"] and counts["swiglu"] and counts["rope"]
    assert bool(counts.get("lora_linear")) == (weights != "full")
    compare(got, want, 2e-4)
    if trainer not in READS_LOGITS or trl_version() >= FUSED_FORWARD_SINCE:
        assert got.fused and calls.tigon > 0


def test_tables_of_the_page_are_generated_from_the_cases() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(text), "run: python tests/integrations/trainers_page.py"
