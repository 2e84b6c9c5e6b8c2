"""Every public name of liger-kernel 0.8.5 is offered, or docs/liger.md says why not. `liger_names.json` has the names.

Public are the classes and functions that a module defines without a leading underscore, and what Liger's packages
re-export. What a module imports for its own use, and constants, are not.
"""

from __future__ import annotations

from liger_page import NAMES, PAGE, render

from tigon.compat.liger.absent import ABSENT, reason_for
from tigon.compat.liger.errors import missing
from tigon.compat.liger.offered import OFFERED


def _dotted() -> list[tuple[str, str, str]]:
    """(module, name, dotted name without `liger_kernel.`) of each public name."""
    at_root = "liger_kernel"
    return [
        (
            module if module == at_root else f"{at_root}.{module}",
            name,
            name if module == at_root else f"{module}.{name}",
        )
        for module, names in NAMES.items()
        for name in names
    ]


def test_every_public_name_is_either_offered_or_absent_with_a_reason() -> None:
    both = [dotted for module, name, dotted in _dotted() if name in OFFERED.get(module, {}) and reason_for(dotted)]
    neither = [
        dotted for module, name, dotted in _dotted() if name not in OFFERED.get(module, {}) and not reason_for(dotted)
    ]
    assert not both
    assert not neither


def test_offered_names_are_names_of_liger_or_functions_for_more_families() -> None:
    public = {name for _, name, _ in _dotted()}
    more = {name for names in OFFERED.values() for name in names} - public
    assert all(name.startswith("apply_liger_kernel_to_") for name in more)


def test_each_reason_has_at_least_one_name() -> None:
    assert {row.reason for row in ABSENT} == {reason_for(dotted) for _, _, dotted in _dotted()} - {None}


def test_the_names_that_people_import_are_counted() -> None:
    """Distinct names of the four packages that scripts import from, `apply_liger_kernel_to_*` among them."""
    packages = ("transformers", "transformers.functional", "ops", "chunked_loss")
    dotted = {name: (f"liger_kernel.{package}", f"{package}.{name}") for package in packages for name in NAMES[package]}
    offered = {name for name, (module, _) in dotted.items() if name in OFFERED[module]}
    absent = {name for name, (_, path) in dotted.items() if reason_for(path)}
    assert offered | absent == set(dotted)
    assert (len(dotted), len(offered), len(absent)) == (198, 102, 96)


def test_refusal_of_a_name_gives_the_reason() -> None:
    message = missing("liger_kernel.megatron.rms_norm.LigerMegatronRMSNorm")
    assert "Megatron-LM" in message and "docs/liger.md" in message
    assert "Megatron-LM" in missing("liger_kernel.megatron.monkey_patch.apply_liger_kernel_to_megatron")
    assert "no counterpart of liger_kernel.nonsense" in missing("liger_kernel.nonsense")


def test_page_lists_the_absent_names() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render(text), "run: PYTHONPATH=src:tests python tests/compat/liger_page.py"
