"""What users may import, and that each name says what it takes, returns and raises."""

from __future__ import annotations

import inspect
import pkgutil
import re

import pytest

import tigon

PUBLIC = [
    "AutoModelForCausalLM",
    "ExpertUnit",
    "LoraLayer",
    "PatchReport",
    "PrefixGroup",
    "PrefixRow",
    "VocabParallelOptions",
    "__version__",
    "add_rms_norm",
    "attention_with_sinks",
    "causal_conv1d",
    "checkpoint",
    "cross_entropy",
    "errors",
    "experts",
    "fp8_linear",
    "gated_delta_rule",
    "gated_rms_norm",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_kl",
    "linear_logprobs",
    "load_balancing_loss",
    "logprobs",
    "lora_linear",
    "lora_linears",
    "losses",
    "multi_head_linear_cross_entropy",
    "nn",
    "patch",
    "patch_fp8",
    "plan",
    "prepare_targets",
    "rms_norm",
    "rope",
    "shared_prefix_attention",
    "swiglu",
    "topk_sigmoid",
    "topk_softmax",
]


def test_public_names_are_the_listed_ones() -> None:
    assert sorted(tigon.__all__) == PUBLIC
    # Importing a submodule binds its name in `tigon`; only `errors`, `losses` and `nn` are part of the API.
    rooms = {module.name for module in pkgutil.iter_modules(tigon.__path__)} - set(PUBLIC)
    visible = {name for name in vars(tigon) if not name.startswith("_")} - rooms - {"annotations"}
    assert visible | {"__version__"} == set(PUBLIC)


FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(tigon, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_documents_arguments_results_and_errors(name: str) -> None:
    function = getattr(tigon, name)
    doc = inspect.getdoc(function) or ""
    sections = re.split(r"^(Args|Returns|Raises):\n", doc, flags=re.M)
    assert sections[1::2] == ["Args", "Returns", "Raises"]
    args, returns, raises = sections[2::2]
    documented = {word for line in re.findall(r"^    ([\w, ]+):", args, flags=re.M) for word in line.split(", ")}
    flags = {p for p, v in inspect.signature(function).parameters.items() if v.kind is v.VAR_KEYWORD}
    assert documented == set(inspect.signature(function).parameters) - flags
    assert sections[0].split("\n\n")[0].strip().endswith(".") and returns.strip()
    named = [word for line in re.findall(r"^    ([\w, ]+):", raises, flags=re.M) for word in line.split(", ")]
    assert named and all(issubclass(getattr(tigon.errors, error), tigon.errors.TigonError) for error in named)
    assert not re.search(r"(other )?errors (as|`)", doc, flags=re.I), "an error needs its condition, not a reference"
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", tigon.nn.__all__)
def test_every_public_module_class_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(tigon.nn, name))
