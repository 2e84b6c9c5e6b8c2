"""Charts on a page: their colours follow the page's, and a phone gets figures with one panel per line."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")
from tigon.report.chart import IN_THE_DARK, LIMIT, PAGE_COLOURS, for_phone, new_figure, on_page, style_variables, svg
from tigon.trainer.report import charts


def drawn():
    figure, (left, right) = new_figure(2, columns=2)
    left.plot([1, 2], [3, 4], color="#c2410c")
    left.set(xlabel="step", ylabel="loss (nats per token)")
    right.plot([1, 2], [4, 3], color="#0f766e")
    right.bar([1], [2], color="#1d4ed8", hatch="//")
    return svg(figure, "two")


def size(text):
    return [float(value) for value in re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text).groups()]


def contrast(first, second):
    """The ratio of WCAG 2: 1 for equal colours, 21 for black on white."""
    parts = [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in (first, second)]
    linear = [[c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour] for colour in parts]
    lights = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def test_every_colour_of_data_is_seen_on_a_light_and_on_a_dark_page():
    from tigon.sweep import charts as of_sweeps

    drawn = {
        *charts._COLOURS,
        LIMIT,
        *(colour for colour, *_ in of_sweeps.LOOKS if colour not in PAGE_COLOURS),
    }
    assert drawn <= IN_THE_DARK.keys()
    for light, dark in IN_THE_DARK.items():
        assert contrast(light, "#ffffff") > 4.5 and contrast(dark, "#111827") > 4.5, light


def test_every_colour_of_a_chart_follows_the_pages():
    text = on_page(drawn())
    assert not re.search(rf": ({'|'.join(PAGE_COLOURS)})\b", text)
    assert "var(--page, #ffffff)" in text and "var(--soft, #6b7280)" in text
    assert "stroke: var(--data-c2410c, #c2410c)" in text and "--data-0f766e: #2dd4bf;" in style_variables(dark=True)
    assert not re.search(rf"[^,] ({'|'.join(IN_THE_DARK)})\b|fill=\"#", text), "a hatched bar has a pattern"


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
