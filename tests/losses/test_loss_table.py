"""The table of losses and the docstrings: every function is documented, and every paper is an arXiv number."""

from __future__ import annotations

import inspect
import re

import pytest

from tigon import errors, losses

FUNCTIONS = [name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))]


@pytest.mark.parametrize("name", losses.LOSSES)
def test_every_row_of_the_table_names_a_function_and_papers(name: str) -> None:
    assert name in FUNCTIONS
    for row in losses.LOSSES[name].values():
        assert row.formula and row.papers
        assert all(re.fullmatch(r"\d{4}\.\d{5}", paper) for paper in row.papers)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_documents_arguments_result_and_errors(name: str) -> None:
    function = getattr(losses, name)
    sections = re.split(r"^(Args|Returns|Raises):\n", inspect.getdoc(function) or "", flags=re.M)
    assert sections[1::2] == ["Args", "Returns", "Raises"]
    arguments, returns, raises = sections[2::2]
    documented, raised = (
        {word for line in re.findall(r"^    (\w[\w, ]*):", text, flags=re.M) for word in line.split(", ")}
        for text in (arguments, raises)
    )
    assert documented == set(inspect.signature(function).parameters)
    assert returns.strip() and raised <= set(vars(errors))


@pytest.mark.parametrize("name", [name for name in losses.__all__ if name.endswith("Loss")])
def test_options_of_a_module_have_the_functions_defaults(name: str) -> None:
    cls = getattr(losses, name)
    if not issubclass(cls, losses.common.LossModule):
        return
    function = getattr(losses, {"PPOValueLoss": "ppo_value"}.get(name, name.removesuffix("Loss").lower()))
    ours, theirs = inspect.signature(cls).parameters, inspect.signature(function).parameters
    assert {option: p.default for option, p in ours.items()} == {option: theirs[option].default for option in ours}
