"""The report shows what was measured, loads nothing from anywhere, and reads no string of the user's as markup."""

from __future__ import annotations

import html.parser
import json
import re

import pytest
import torch
from trainer_helpers import records, words

from forks import python
from tigon.trainer import run

pytestmark = pytest.mark.charts

EVIL = "<script>alert(1)</script>"


class Elements(html.parser.HTMLParser):
    """Tags and attributes of a page; text is collected apart."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of one run with a comparison and hostile names, made by the real command."""
    import yaml
    from trainer_helpers import TINY_MODEL

    here = tmp_path_factory.mktemp("report")
    (here / f"{EVIL.replace('/', '_')}.txt").write_text(words(2000), encoding="utf-8")
    recipe = {
        "model": {"kernels": "none", "config": TINY_MODEL},
        "data": {
            "source": f"{EVIL.replace('/', '_')}.txt",
            "vocab_size": 400,
            "sequence_length": 32,
            "eval_fraction": 0.1,
        },
        "train": {"steps": 4, "batch_size": 4, "log_steps": 1, "eval_steps": 2, "device": "cpu"},
        "comparison": {"steps": 3},
        "output": {"name": "r", "sample_tokens": 4, "sample_prompt": f"{EVIL} | `x` ``` {{{{ 7 * 7 }}}}"},
    }
    (here / "r.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(here / "cache"))
        done = python("train", "r.yaml", module="tigon", cwd=here)
    assert done.returncode == 0, done.stderr
    return here / "runs" / "r"


def test_no_string_of_the_users_becomes_markup(finished):
    text = (finished / "report.html").read_text(encoding="utf-8")
    page = Elements(text)
    assert "script" not in page.tags and EVIL not in text
    assert EVIL in page.text, "the prompt is missing, so the test shows nothing"
    assert "{{ 7 * 7 }}" in page.text and "49" not in page.text.split("{{ 7 * 7 }}")[0][-20:]
    assert not [a for a in page.attributes if a[1].startswith("on")]


def test_no_string_of_the_users_becomes_markdown(finished):
    text = (finished / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "<" not in outside and "```" not in outside
    assert EVIL in text, "the prompt is missing, so the test shows nothing"


def test_charts_are_inlined_and_every_reference_finds_its_element(finished):
    text = (finished / "report.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 6 and "<metadata>" not in text, "three charts, each also for a phone"
    assert text.count('id="phone-loss-') and not re.search(r"(fill|stroke): #(ffffff|1f2937|6b7280|e5e7eb)", text), (
        "ink, lines and background follow the page's colours"
    )
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "two charts share an id"
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)


def test_the_report_says_what_the_records_say(finished):
    page = Elements((finished / "report.html").read_text(encoding="utf-8")).text
    (result,), train = records(finished, "result"), records(finished, "train")
    (data,) = records(finished, "data")
    assert [record["step"] for record in train] == [1, 2, 3, 4]
    assert "tigon-demo (random weights)" in page, "nothing was fine-tuned"
    assert "Its weights were random before" in (finished / "model" / "README.md").read_text(encoding="utf-8")
    assert f"{result['eval_loss']:.4f}" in page and f"{data['unigram_entropy']:.4f}" in page
    assert records(finished, "eval")[-1]["eval_loss"] == result["eval_loss"]
    for row in result["comparison"]:
        assert row["error"] is None and f"{row['losses'][-1]:.6f}" in page and f"{row['tokens_per_s']:,.0f}" in page
        slowest, fastest = row["tokens_per_s_range"]
        assert slowest <= row["tokens_per_s"] <= fastest and f"{slowest:,.0f} to {fastest:,.0f}" in page
        assert row["timed_steps"] == 1 + 2 + 2, (
            "the warm-up of each turn and the step that measures memory are left out"
        )
    for name in ("torch", "transformers", "python"):
        assert json.loads((finished / "environment.json").read_text())["versions"][name] in page


def test_the_comparison_measures_the_same_training_with_less_memory(finished):
    (result,) = records(finished, "result")
    unpatched, without, everything = result["comparison"]
    assert [row["kernels"] for row in result["comparison"]] == ["none", "no-flce", "tigon"]
    for row in (without, everything):
        assert row["losses"] == pytest.approx(unpatched["losses"], rel=1e-4)
        assert row["at_rest_bytes"] == unpatched["at_rest_bytes"]
    assert everything["peak_bytes"] < without["peak_bytes"] <= unpatched["peak_bytes"] * 1.001


def test_kernels_of_a_comparison_take_turns_and_one_without_memory_leaves_the_others(recipe, tigon, here, monkeypatch):
    """Steps in turns, the second turn in reverse: a load that comes and goes cannot favour one choice."""
    order, real = [], run._build

    def build(folder, prepared, kernels):
        order.append(kernels)
        if kernels == "no-flce":
            raise torch.OutOfMemoryError("too large")
        return real(folder, prepared, kernels)

    monkeypatch.setattr(run, "_build", build)
    outcome = tigon("train", recipe(train={"steps": 1}, comparison={"steps": 2}, output={"sample_tokens": 0}))
    assert outcome.code == 0, outcome.err
    _, *turns = order
    assert turns == ["none", "no-flce", "tigon", "tigon", "none", "none", "tigon"]
    assert outcome.out.splitlines()[1].startswith("model    tigon-demo (random weights), ")
    assert "comparison: turn 3 of 3, 2 steps each: unpatched, all of tigon" in outcome.out
    assert re.search(r"^all of tigon .*\d to [\d,]+ *$", outcome.out, re.MULTILINE)
    assert "all but linear cross entropy: out of memory" in outcome.out
    rows = records(here / "runs" / "r", "result")[0]["comparison"]
    assert [row["error"] for row in rows] == [None, "out of memory", None]
    assert [row["timed_steps"] for row in rows] == [2, 0, 2]


def test_the_run_folder_holds_what_the_docs_say(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"recipe.yaml", "environment.json", "data.json", "metrics.jsonl", "tensorboard", "tokenizer", "model",
            "charts",
            "report.md", "report.html", "summary.json"} <= names  # fmt: skip
    assert (finished / "model" / "model.safetensors").is_file()
    events = list((finished / "tensorboard").iterdir())
    assert len(events) == 1 and events[0].stat().st_size > 0
    assert not list(finished.rglob("*.bin")) and not list(finished.rglob(".*"))
