"""What users may import, and that each name says what it takes, returns and raises."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import tigon

PUBLIC = [
    "AutoModelForCausalLM",
    "PatchReport",
    "__version__",
    "add_rms_norm",
    "cross_entropy",
    "errors",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "multi_head_linear_cross_entropy",
    "nn",
    "patch",
    "prepare_targets",
    "rms_norm",
    "rope",
    "swiglu",
]


def test_public_names_are_the_listed_ones() -> None:
    assert sorted(tigon.__all__) == PUBLIC
    # Importing a submodule binds its name in `tigon`; only `errors` and `nn` are part of the API.
    rooms = {module.name for module in pkgutil.iter_modules(tigon.__path__)} - set(PUBLIC)
    visible = {name for name in vars(tigon) if not name.startswith("_")} - rooms - {"annotations"}
    assert visible | {"__version__"} == set(PUBLIC)


FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(tigon, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_documents_arguments_results_and_errors(name: str) -> None:
    function = getattr(tigon, name)
    doc = inspect.getdoc(function) or ""
    for section in ("Args:", "Returns:", "Raises:"):
        # Functions that point to a sibling's section say so in their first lines.
        assert section in doc or "errors as" in doc or "errors `" in doc or name == "prepare_targets", section
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", tigon.nn.__all__)
def test_every_public_module_class_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(tigon.nn, name))
