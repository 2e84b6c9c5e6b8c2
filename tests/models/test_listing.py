"""`tigon models` and docs/models.md say what the installed code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models_helpers import FITS_FROM, too_old

from benchmarks.pages import model_families
from tigon.cli.commands.models import models
from tigon.errors import OptionError, PatchError
from tigon.models import MODELS
from tigon.models.verification import listing
from tigon.models.verification.small_models import families_without_a_row

DOCS = Path(__file__).parents[2] / "docs"


def between(document: str, name: str) -> str:
    return document.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0]


every_row_fits = pytest.mark.skipif(
    any(map(too_old, FITS_FROM.values())), reason="some rows fit newer releases of transformers alone"
)


@every_row_fits
def test_table_of_the_docs_matches_the_installed_rows():
    """Run `python -m benchmarks.pages.model_families rows`."""
    assert between((DOCS / "models.md").read_text(encoding="utf-8"), "rows") == model_families.rows()


def test_families_without_a_row_in_the_docs_match_the_installed_transformers():
    """Run `python -m benchmarks.pages.model_families others`. Another version of transformers knows other families."""
    import transformers

    table = between((DOCS / "models-by-structure.md").read_text(encoding="utf-8"), "others")
    summary, *lines = table.splitlines()
    if not summary.startswith(f"transformers {transformers.__version__}:"):
        pytest.skip(f"the page was made with another version of transformers: {summary}")
    listed = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1] for line in lines[3:]}
    assert set(listed) == set(families_without_a_row())
    assert "differs" not in listed.values()


@every_row_fits
def test_every_family_is_printed_with_its_ops_and_reasons(capsys):
    assert models() is True
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in MODELS)
    assert "nemotron" in out and "mlp left alone: it has no gate" in out and "capped by final_logit_softcapping" in out


@every_row_fits
def test_a_family_gets_an_op_in_each_column_or_a_reason():
    for family in listing.families():
        named = " ".join(what.lower() for what, _ in family.left_alone)
        assert {"swiglu", "geglu", "experts"} & set(family.report.counts) or "mlp" in named, family.row.model_type
        assert "rope" in family.report.counts or "rope" in named, family.row.model_type
        assert {"rms_norm", "layer_norm"} & set(family.report.counts), family.row.model_type


def test_json_holds_the_verification_of_each_family(capsys):
    assert models(["llama", "gpt2"], as_json=True) is True
    record = json.loads(capsys.readouterr().out)
    assert record["verified"] == 2 and [f["model_type"] for f in record["families"]] == ["llama", "gpt2"]
    for family in record["families"]:
        assert family["verification"]["passed"] and family["gets"]["linear_cross_entropy"] == 1
        assert all(
            check["error"] is None or check["error"] <= check["bound"] for check in family["verification"]["checks"]
        )


def test_family_that_differs_is_reported_as_failed(capsys, monkeypatch):
    from tigon import ops

    original = ops.linear_cross_entropy
    monkeypatch.setattr(ops, "linear_cross_entropy", lambda *args, **options: original(*args, **options) * 1.01)
    assert models(["llama"], verified=True) is False
    assert "FAILED: labels" in capsys.readouterr().out


def test_family_that_patch_refuses_is_listed_with_the_reason_and_the_next_ones_follow(capsys, monkeypatch):
    original = listing.apply_row

    def older(model, row):
        if row.model_type == "llama":
            raise PatchError("rope: nothing in this LlamaForCausalLM can run it. Nothing was changed.")
        return original(model, row)

    monkeypatch.setattr(listing, "apply_row", older)
    assert models(["llama", "gpt2"], verified=True) is False
    out = capsys.readouterr().out
    assert "the family left alone: rope: nothing in this LlamaForCausalLM" in out and "\ngpt2 " in out
    assert models(["llama"], as_json=True) is False
    (family,) = json.loads(capsys.readouterr().out)["families"]
    assert family["refused"].startswith("rope: ") and family["gets"] == {}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"names": ["bert"]}, "bert is not in the table"),
        ({"verified": True, "dtype": "fp16"}, "fp16"),
        ({"verified": True, "device": "nowhere"}, "nowhere"),
        ({"device": "cpu"}, "--verify"),
    ],
)
def test_option_that_has_no_effect_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        models(**options)
