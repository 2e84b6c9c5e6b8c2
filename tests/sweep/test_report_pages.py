"""The pages of `tigon sweep` and `tigon train` in a browser: no error, no sideways scrolling, dark when asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import look, needs_chromium
from tigon.sweep.run import sweep

pytestmark = pytest.mark.charts

SCRIPT = """
say("width", document.documentElement.scrollWidth + " " + document.documentElement.clientWidth);
say("paper", getComputedStyle(document.body).backgroundColor);
say("charts", [...document.querySelectorAll("svg")].filter(svg => {
  const box = svg.getBoundingClientRect();
  return box.width > 300 && box.height > 100 && svg.querySelectorAll("path, text").length > 20;
}).length);
say("letters", Math.min(...[...document.querySelectorAll("svg text")].map(text => {
  const svg = text.ownerSVGElement, width = svg.getBoundingClientRect().width;
  return width ? parseFloat(getComputedStyle(text).fontSize) * width / svg.viewBox.baseVal.width : 99;
})));
"""


@pytest.fixture
def sweep_page(write_sweep, fake_workers) -> tuple[Path, int]:
    """(the page, its charts) of a sweep with long names."""
    path = write_sweep(
        grid={"train.batch_size": [4, 16]}, about="w" * 200,
        variants={"a name without a space_" + "x" * 60: {}, "fat": {"train.seed": 2}, "bad": {"train.seed": 5}},
    )  # fmt: skip
    return (sweep(path) / "report.html").resolve(), 1


@pytest.fixture
def train_page(here, tigon) -> tuple[Path, int]:
    """The page of a short run with a comparison."""
    import yaml

    recipe = {
        "model": {"kernels": "none", "config": {
            "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 128,
        }},
        "data": {"max_text_mib": 0.03, "vocab_size": 400, "sequence_length": 32, "eval_fraction": 0.1},
        "train": {"steps": 4, "batch_size": 4, "log_steps": 1, "device": "cpu"},
        "comparison": {"steps": 3}, "output": {"name": "r", "sample_tokens": 4, "save_model": False},
    }  # fmt: skip
    (here / "r.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    code, _, err = tigon("train", "r.yaml")
    assert code == 0, err
    return here / "runs" / "r" / "report.html", 3


@needs_chromium
@pytest.mark.parametrize("kind", ["sweep_page", "train_page"])
def test_page_opens_without_errors_and_fits_a_phone(kind, request):
    page, n_charts = request.getfixturevalue(kind)
    assert look(page, width=390).console == (), "under its own policy nothing fails and nothing is refused"
    light, dark = (look(page, width=390, dark=dark, script=SCRIPT) for dark in (False, True))
    for seen in (light, dark):
        assert seen.console == ()
        needed, has = map(int, seen.said("width").split())
        assert needed <= has, "the page scrolls sideways"
        assert int(seen.said("charts")) >= n_charts
        assert 7 < float(seen.said("letters")) < 20, "pixels of the smallest letters of a chart"
    assert light.said("paper") == "rgb(255, 255, 255)" != dark.said("paper")
