"""The peak of memory against cases computed by hand, and what must and must not count."""

from __future__ import annotations

import os

import pytest
import torch

from tigon.profiler.recording.peak import PeakMeter, storage_bytes, training_state

KIB = 1024
CPU = torch.device("cpu")


def floats(kib):
    return torch.empty(kib * KIB // 4)


def measured(work, alive=()):
    meter = PeakMeter(CPU)
    meter.start(alive)
    kept = work()
    peak = meter.stop()
    del kept
    return peak


def test_peak_matches_a_hand_computed_sequence():
    def work():
        a = floats(4)  # 4
        b = floats(8)  # 12, the peak
        del b  # 4
        c = a[:10]  # a view: still 4
        a += 1  # in place: still 4
        del a  # c keeps it: still 4
        d = floats(6)  # 10
        return c, d

    assert measured(work).peak_bytes == 12 * KIB


def test_what_was_there_counts_once_however_many_views_it_has():
    weight = floats(8)
    alive = [weight, weight.view(2, -1), weight]
    assert storage_bytes(alive) == 8 * KIB
    peak = measured(weight.clone, alive)
    assert (peak.at_rest_bytes, peak.peak_bytes, peak.step_bytes) == (8 * KIB, 16 * KIB, 8 * KIB)


def test_what_autograd_keeps_for_backward_counts():
    x = torch.ones(KIB, requires_grad=True)  # 4 KiB

    def work():
        y = x
        for _ in range(5):
            y = y.exp()  # each result is saved for backward: 20 KiB
        return y

    assert measured(work).peak_bytes == 20 * KIB
    with torch.no_grad():
        assert measured(work).peak_bytes == 8 * KIB


def test_scratch_memory_inside_an_operator_counts():
    """A logits-sized temporary that no operator returns would hide exactly what a chunked loss still needs."""
    x = torch.randn(64, 4 * KIB)  # 1 MiB
    peak = measured(lambda: torch.logsumexp(x, dim=-1))
    assert peak.peak_bytes >= 1024 * KIB


def test_a_training_step_is_measured_beyond_weights_and_optimizer():
    model = torch.nn.Linear(64, 64, bias=False)  # 16 KiB
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(32, 64)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # AdamW's state appears in the first step
    peak = measured(step, training_state(model, optimizer))
    assert peak.at_rest_bytes == 3 * 16 * KIB + 4  # weight, two moments, the step counter
    # the largest moment of backward: the output, its square's gradient, and the weight's gradient
    assert 16 * KIB + 8 * KIB <= peak.step_bytes <= 16 * KIB + 4 * 8 * KIB


def test_measuring_writes_nothing_and_gives_stderr_back(capfd):
    older = [floats(4)]
    measured(older.clear)  # memory from before the measurement: the allocator wants to log that
    os.write(2, b"after")
    assert capfd.readouterr() == ("", "after")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_meter_reads_the_allocator_on_cuda():
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.ones(2**20, device=device)
    meter = PeakMeter(device)
    meter.start([kept])
    big = torch.ones(4 * 2**20, device=device)
    del big
    peak = meter.stop()
    assert peak.at_rest_bytes >= 4 * 2**20 and peak.step_bytes == 16 * 2**20
