"""The page and the drawing: what they say, that they load nothing, and that a browser shows them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from profiler_helpers import MIB, profile_of, step_by_hand

from browser import look, needs_chromium
from tigon.profiler.render.op_table import OpRow
from tigon.profiler.render.tables import components, operators, peak_line, phases, pieces
from tigon.profiler.timeline.timeline import Call
from tigon.report.chart import MEMORY_COLOURS

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

HOSTILE = "</script><script>say('x')</script><img src=x onerror=alert(1)> $\\frac$ & \"' \u2028"
OPS = [OpRow("aten::mm", 2.0, 0.8, 3, 4e9), OpRow(HOSTILE, 0.5, 0.2, 1, 0.0)]


def hostile(predicted=True):
    timeline = step_by_hand()
    calls = [Call(HOSTILE, call.node, (HOSTILE, *call.frames)) for call in timeline.call_table]
    timeline = replace(timeline, label=HOSTILE, call_table=calls, notes=[HOSTILE])
    return replace(profile_of(timeline, predicted=predicted, ops=OPS), details={HOSTILE: HOSTILE})


def rendered(*profiles):
    from tigon.profiler.render import page

    return page.render(profiles)


def test_tables_agree_with_the_peak():
    profile = profile_of(step_by_hand(), predicted=True, ops=OPS)
    assert peak_line(profile).startswith(
        "peak 22.0 MiB in backward of step 1, layer 0, reached by 4.0 MiB of gradients"
    )
    table = components([profile])
    assert table.columns == ("at the peak", "measured", "predicted", "off by")
    assert ("logits and loss", "8.0 MiB", "8.8 MiB", "+10.0%") in table.rows
    assert table.rows[-1] == ("all", "22.0 MiB", "24.2 MiB", "+10.0%")
    assert phases([profile]).rows[0] == ("load", "6.0 MiB", "6.6 MiB", "+10.0%")
    assert pieces(profile).rows[0][:3] == ("8.0 MiB", "1", "logits and loss, in loss")
    rows = operators(profile).rows
    assert rows[0] == ("aten::mm", "2 ms", "80.0%", "3", "2.0 TFLOP/s") and rows[-1][0] == "all"
    assert operators(profile_of(step_by_hand())) is None
    pair = components([profile, profile_of(step_by_hand())])
    assert pair.columns == ("at the peak", "A: measured", "A: predicted", "off by", "B: measured")


def test_no_string_of_the_user_becomes_markup():
    page = rendered(hostile())
    assert page.count("<script") == 2 and "<img" not in page, "ours: the data and the script"
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert "<" not in data and "&" not in data
    digest = base64.b64encode(hashlib.sha256(page.rsplit("<script>", 1)[1].split("</script>")[0].encode()).digest())
    assert f"script-src 'sha256-{digest.decode()}'" in page
    assert "default-src 'none'" in page


def test_page_loads_nothing_from_outside():
    page = rendered(profile_of(step_by_hand(), predicted=True, ops=OPS[:1]))
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest""", page)


@pytest.mark.parametrize("runs", [1, 2])
def test_drawing_is_well_formed_and_complete(runs):
    from tigon.profiler.timeline.memory_chart import draw

    drawing = draw([hostile()] * runs)
    root = ET.fromstring(drawing)
    texts = " ".join(e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text"))
    texts = texts.replace("\N{NO-BREAK SPACE}", " ")
    assert texts.count("peak 22.0 MiB, backward of step 1, layer 0") == runs
    for wanted in ("predicted", "logits and loss", "forward 1", "at the peak: weights 4.0 MiB"):
        assert wanted in texts
    assert {e.tag.split("}")[1] for e in root.iter()} <= {"svg", "defs", "style", "g", "path", "use", "text", "tspan",
                                                           "clipPath", "rect"}  # fmt: skip
    assert len(drawing) < 150_000


def test_drawing_of_a_long_run_has_a_bounded_size_and_keeps_its_peak():
    from tigon.profiler.timeline.memory_chart import COLUMNS, sampled

    totals = [i % 97 for i in range(100_000)]
    totals[54_321] = 1000
    kept = sampled(totals, COLUMNS)
    assert 54_321 in kept and len(kept) <= 2 * COLUMNS + 2 and kept == sorted(set(kept))
    assert sampled([], COLUMNS) == [] and sampled([5], COLUMNS) == [0]


VISIT = """
const chart = charts[0], box = chart.canvas.getBoundingClientRect();
say("width", document.documentElement.scrollWidth + " " + innerWidth);
say("drawn", document.documentElement.dataset.drawn);
const pen = chart.canvas.getContext("2d", { willReadFrequently: true });
const found = {};
const pixels = pen.getImageData(0, 0, chart.canvas.width, chart.canvas.height).data;
for (const name of NAMES) {
  const [r, g, b] = colour(name).match(/\\w\\w/g).map((each) => parseInt(each, 16));
  let count = 0;
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i] === r && pixels[i + 1] === g && pixels[i + 2] === b) count++;
  found[name] = count;
}
say("pixels", JSON.stringify(found));
const x = chart.x(chart.place(chart.run.peak)) + 0.5;
const at = (type, px) => chart.canvas.dispatchEvent(new PointerEvent(type, {
  clientX: box.left + px, clientY: box.top + 99, bubbles: true, pointerType: "mouse" }));
at("pointermove", x);
say("tip", chart.tip.textContent);
say("tip-inside", String(chart.tip.getBoundingClientRect().right <= innerWidth));
at("click", x);
say("kept", chart.kept.textContent);
at("pointerdown", x - 30); at("pointermove", x + 30); at("pointerup", x + 30);
say("zoomed", JSON.stringify([chart.from, chart.to, chart.limit()]));
at("dblclick", x);
say("whole", JSON.stringify([chart.from, chart.to]));
document.getElementById("axis").click();
at("pointermove", box.width - 20);
say("time", chart.tip.textContent + alongTime);
"""


@needs_chromium
@pytest.mark.parametrize(("width", "dark", "runs"), [(1200, False, 2), (390, True, 1)])
def test_browser_shows_the_profile(tmp_path, width, dark, runs):
    page = tmp_path / "profile.html"
    page.write_text(rendered(*[hostile()] * runs), encoding="utf-8")
    seen = look(page, width=width, dark=dark)
    assert seen.console == (), "with its own policy, nothing is refused and nothing fails"
    assert f'data-drawn="{runs}"' in seen.dom
    seen = look(page, width=width, dark=dark, script=VISIT)
    assert seen.console == ()
    needed, has = map(int, seen.said("width").split())
    assert needed <= has, "the page scrolls sideways"
    pixels = json.loads(seen.said("pixels"))
    timeline = step_by_hand()
    assert {name for name, count in pixels.items() if count > 20} == set(timeline.categories)
    assert pixels["logits"] > pixels["checkpoints"]
    tip = seen.said("tip")
    assert tip.startswith("22.0 MiB, backward of step 1, layer 0allocates 4.0 MiB of gradients")
    assert "logits and loss 8.0 MiB" in tip and "&lt;img" in tip, "texts are put in as text"
    assert seen.said("tip-inside") == "true"
    assert "8.0 MiB1 xlogits and loss" in seen.said("kept")
    start, end, limit = json.loads(seen.said("zoomed"))
    assert 0 < end - start < limit
    assert json.loads(seen.said("whole")) == [0, limit]
    assert seen.said("time").endswith("true") and "event 21, 20 ms" in seen.said("time")


@needs_chromium
def test_dark_and_light_mode_have_their_own_colours(tmp_path):
    page = tmp_path / "profile.html"
    page.write_text(rendered(profile_of(step_by_hand(), predicted=True)), encoding="utf-8")
    script = "say('paper', getComputedStyle(document.body).backgroundColor); say('weights', colour('weights'));"
    light, dark = (look(page, script=script, dark=dark) for dark in (False, True))
    assert (light.said("weights"), dark.said("weights")) == MEMORY_COLOURS["weights"]
    assert light.said("paper") == "rgb(255, 255, 255)" != dark.said("paper")


def test_sizes_of_the_run_by_hand_are_whole_mib():
    assert sum(step_by_hand().sizes) % MIB == 0
