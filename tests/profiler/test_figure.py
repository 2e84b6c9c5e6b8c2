"""Charts on a page: their colours follow the page's, and a phone gets figures with one panel per line."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")
from tigon.profiler.render.figure import PAGE_COLOURS, for_phone, new_figure, on_page, svg
from tigon.trainer.report import charts


def drawn():
    figure, (left, right) = new_figure(2, columns=2)
    left.plot([1, 2], [3, 4], color="#c2410c")
    left.set(xlabel="step", ylabel="loss (nats per token)")
    right.plot([1, 2], [4, 3], color="#0f766e")
    return svg(figure, "two")


def size(text):
    return [float(value) for value in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text).groups()]


def test_ink_lines_and_background_take_the_pages_colours_and_data_keep_theirs():
    text = on_page(drawn())
    assert not re.search(rf": ({'|'.join(PAGE_COLOURS)})\b", text)
    assert "var(--page, #ffffff)" in text and "var(--soft, #6b7280)" in text
    assert "stroke: #c2410c" in text and "stroke: #0f766e" in text


def test_phone_gets_panels_one_below_the_other_at_half_the_width():
    wide = drawn()
    with for_phone():
        narrow = drawn()
    assert size(narrow)[0] == size(wide)[0] / 2 and size(narrow)[1] == 2 * size(wide)[1]
    assert 'id="phone-two-' in narrow and 'id="two-' in wide and drawn() == wide


def train_record(step):
    return {"event": "train", "step": step, "loss": 3.0, "tokens_per_s": 9, "memory_bytes": 1, "memory_peak_bytes": 2}


def test_chart_without_a_line_is_left_out_and_a_single_loss_is_a_dot():
    summary = {"unigram_entropy": 7.0, "comparison": []}
    one = charts.draw([train_record(1)], summary, None)
    assert set(one) == {"loss"}, "throughput over one step would be an empty chart"
    several = charts.draw([train_record(1), train_record(2)], summary, None)
    assert set(several) == {"loss", "throughput"}
    assert one["loss"].count("<use") > several["loss"].count("<use"), "the dot"
