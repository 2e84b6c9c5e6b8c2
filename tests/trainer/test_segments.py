"""A run that is planned with expandable segments switches them on, and says so."""

from __future__ import annotations

import pytest
import torch

from tigon.techniques.keys.settings import Settings
from tigon.trainer.guards import segments

LONG_ROW = Settings.of({"train.checkpointing": "offload"})
CUDA = torch.device("cuda")


@pytest.fixture
def told(monkeypatch):
    """What the allocator of a GPU, which is not there, is told."""
    said = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: None)
    monkeypatch.setattr(segments, "_set", said.append)
    monkeypatch.setattr(segments, "_refusals", [])
    return said


def test_run_with_inputs_on_the_host_switches_them_on(told):
    assert segments.used(LONG_ROW, CUDA)
    segments.switch_on(LONG_ROW, CUDA)
    assert told == ["expandable_segments:True"]


def test_other_runs_and_machines_keep_what_they_have(told, monkeypatch):
    segments.switch_on(Settings.of({"train.checkpointing": "full"}), CUDA)
    segments.switch_on(LONG_ROW, torch.device("cpu"))
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    segments.switch_on(LONG_ROW, CUDA)
    assert told == []


def test_gpu_without_them_gets_the_usual_segments_and_a_line(told, monkeypatch, capsys):
    def fail(*size, **how):
        raise RuntimeError("CUDA driver error: operation not supported\nmore")

    monkeypatch.setattr(torch, "empty", fail)
    segments.switch_on(LONG_ROW, CUDA)
    assert told == ["expandable_segments:True", "expandable_segments:False"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning ") and "operation not supported" in line and "more" not in line
    assert not segments.used(LONG_ROW, CUDA), "the run's lines would name them"
    segments.switch_on(LONG_ROW, CUDA)  # a reference model of the same run
    assert len(told) == 2 and not capsys.readouterr().out


def test_pytorch_without_the_function_keeps_the_usual_segments(told, monkeypatch, capsys):
    monkeypatch.setattr(segments, "_set", lambda text: torch.cuda.memory.no_such_function(text))
    segments.switch_on(LONG_ROW, CUDA)
    assert "no_such_function" in capsys.readouterr().out and not segments.used(LONG_ROW, CUDA)


def test_full_gpu_is_out_of_memory_and_not_without_them(told, monkeypatch):
    def fail(*size, **how):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(torch.OutOfMemoryError):
        segments.switch_on(LONG_ROW, CUDA)
    assert told == ["expandable_segments:True"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allocator_of_a_process_that_has_allocated_before_has_them():
    before = torch.empty(1 << 20, device="cuda")
    try:
        segments.switch_on(LONG_ROW, torch.device("cuda"))
        after = torch.empty(64 << 20, device="cuda")
        places = {segment["address"]: segment for segment in torch.cuda.memory_snapshot()}
        held = [s for at, s in places.items() if at <= after.data_ptr() < at + s["total_size"]]
        assert [segment["is_expandable"] for segment in held] == [True]
        assert before.is_cuda
    finally:
        segments._set("expandable_segments:False")
