"""From allocations to categories, phases and the peak, on a run worked out by hand."""

from __future__ import annotations

import json

import pytest
from profiler_helpers import MIB, Script, profile_of, step_by_hand

from tigon.errors import UsageError
from tigon.profiler.recording.journal import Journal, Recording
from tigon.profiler.render.peak_report import peak_of, phase_peaks
from tigon.profiler.timeline.assemble import assemble
from tigon.profiler.timeline.timeline import Call, Timeline


def category_of(timeline: Timeline, name: str) -> str:
    return next(c for c, call in zip(timeline.categories, timeline.calls, strict=True)
                if timeline.call_table[call].op == f"aten::{name}")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "category"),
    {
        "w": "weights", "init": "workspace", "hidden": "checkpoints", "act": "activations", "mm": "logits",
        "_log_softmax_backward_data": "logits", "again": "activations", "temporary": "workspace", "grad": "gradients",
        "state": "optimizer", "update": "workspace", "next": "activations",
    }.items(),
)  # fmt: skip
def test_every_block_has_its_category(name, category):
    assert category_of(step_by_hand(), name) == category


def test_peak_has_its_components_pieces_and_last_call():
    timeline = step_by_hand()
    peak = peak_of(timeline)
    # logits are gone, their gradient 8, the layer again 3, a temporary 2, a gradient 4, the input 1, weights 4
    assert peak.nbytes == 22 * MIB == max(timeline.totals())
    assert (peak.phase.name, peak.phase.step, peak.phase.layer) == ("backward", 1, 0)
    parts = {name: size // MIB for name, size in peak.components.items() if size}
    assert parts == {"weights": 4, "gradients": 4, "checkpoints": 1, "activations": 3, "logits": 8, "workspace": 2}
    assert sum(piece.nbytes for piece in peak.pieces) == peak.nbytes
    first = peak.pieces[0]
    assert (first.category, first.nbytes, first.phase) == ("logits", 8 * MIB, "loss")
    assert timeline.call_table[first.call].node == "LogSoftmaxBackward0"
    assert timeline.call_table[peak.reached_by.call].op == "aten::grad"
    assert next(piece.phase for piece in peak.pieces if piece.category == "activations") == "backward, recomputed"


def test_phases_have_their_own_peaks_and_bands_join_layers():
    timeline = step_by_hand()
    found = {name: size // MIB for name, size in phase_peaks(timeline).items()}
    assert found == {"load": 6, "forward": 13, "loss": 21, "backward": 22, "optimizer": 20}
    bands = [(band.name, band.step) for band in timeline.bands()]
    assert bands == [("load", 0), ("forward", 1), ("loss", 1), ("backward", 1), ("optimizer", 1), ("forward", 2)]
    edges = [edge for band in timeline.bands() for edge in (band.start, band.end)]
    assert edges[0] == 0 and edges[-1] == len(timeline.events) and edges[1:-1:2] == edges[2::2]


def test_live_bytes_are_the_running_sum_of_events():
    timeline = step_by_hand()
    sums = [sum(live.values()) for live in timeline.live_bytes()]
    assert sums == timeline.totals()
    assert sums[-1] == 12 * MIB  # weights and states
    assert all(a < b for a, b in zip(timeline.places(), timeline.places()[1:], strict=False))


def test_weights_from_a_mapped_file_are_counted():
    """No allocator saw them: they are added where they are known to be weights."""
    script = Script()
    journal = Journal(script)
    script.take("other", 1)
    script.tag(journal, "mapped", "weights", 5)
    journal.enter("forward")
    script.take("x", 1)
    timeline = assemble(script.stop(), journal, "mapped")
    assert peak_of(timeline).components["weights"] == (5 + 1) * MIB  # what the load leaves counts as weights
    assert timeline.totals() == [MIB, 6 * MIB, 7 * MIB]


def test_memory_alive_before_the_recording_is_counted():
    script = Script()
    journal = Journal(script)
    script.take("x", 1)
    recording = Recording("cuda:0", script.events, script.positions, base_bytes=3 * MIB)
    assert assemble(recording, journal, "base").totals() == [3 * MIB, 4 * MIB]


def test_release_of_unknown_memory_is_ignored():
    script = Script()
    journal = Journal(script)
    script.take("older", 9)
    script.take("x", 1)
    script.free("older")
    del script.events[0]
    script.positions[:] = [0]
    assert assemble(script.stop(), journal, "older").totals() == [MIB]


def test_profile_survives_being_written_and_read(tmp_path):
    from tigon.profiler.render import result

    profile, path = profile_of(step_by_hand(), predicted=True), tmp_path / "profile.json"
    path.write_text(json.dumps(profile.as_mapping()), encoding="utf-8")
    assert result.read(path) == profile
    path.write_text(json.dumps({"timeline": {"format": 0}}), encoding="utf-8")
    with pytest.raises(UsageError, match="not a profile of this version"):
        result.read(path)


def test_file_that_is_no_profile_is_refused(tmp_path):
    from tigon.profiler.render import result

    path = tmp_path / "profile.json"
    for text in ("", "[]", "{}", '{"timeline": {"format": 1}}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="not a profile"):
            result.read(path)


def test_a_call_names_its_first_line_outside_pytorch():
    call = Call("aten::mm", "MmBackward0", ("torch/nn/modules/linear.py:134 forward", "mine/model.py:7 forward"))
    assert str(call) == "aten::mm (MmBackward0) at mine/model.py:7 forward"
    assert str(Call(node="MmBackward0")) == "MmBackward0"
    assert str(Call()) == "not known"


def test_empty_recording_has_no_peak():
    script = Script()
    timeline = assemble(script.stop(), Journal(script), "nothing")
    assert peak_of(timeline) is None and timeline.totals() == [] and timeline.bands() == []
    assert set(phase_peaks(timeline).values()) == {0}
    with pytest.raises(UsageError, match="nothing was allocated"):
        _ = profile_of(timeline).peak
