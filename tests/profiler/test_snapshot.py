"""The allocator's history of a CUDA device, in the form torch 2.11 writes it, read without one."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from profiler_helpers import MIB, TRAIN, frame, snapshot_of

from tigon.errors import UsageError
from tigon.profiler.recording.cuda import CudaRecorder, read_snapshot
from tigon.profiler.recording.journal import Enter, Journal, Node, Recorder, Recording, Tag
from tigon.profiler.render.peak_report import peak_of
from tigon.profiler.timeline.assemble import assemble

LINEAR = [
    frame(f"{TRAIN}torch/nn/modules/linear.py", 134, "forward"),
    frame(f"{TRAIN}torch/nn/modules/module.py", 1789, "_call_impl"),
    frame(f"{TRAIN}transformers/models/llama/modeling_llama.py", 480, "forward"),
    frame(f"{TRAIN}tigon/trainer/trainer.py", 140, "train"),
    frame("/home/someone/run.py", 3, "<module>"),
]
LOSS = [
    frame(f"{TRAIN}torch/nn/functional.py", 3555, "cross_entropy"),
    frame(f"{TRAIN}transformers/loss/loss_utils.py", 40, "fixed_cross_entropy"),
]
CHUNKS = [frame("/opt/tigon/src/tigon/ops/linear_cross_entropy.py", 186, "forward")]
BACK = [frame("/opt/tigon/src/tigon/techniques/checkpointing/host_offload.py", 90, "unpack")]
GATHERED = [frame(f"{TRAIN}deepspeed/runtime/zero/partition_parameters.py", 74, "__init__")]
SEGMENT = {"action": "segment_alloc", "addr": 0x10, "size": 20 * MIB, "frames": []}


def alloc(address, size, frames=()):
    return {"action": "alloc", "addr": address, "size": size, "frames": list(frames)}


def free(address, size):
    """As the allocator says it: asked for, then done."""
    return [
        {"action": f"free_{word}", "addr": address, "size": size, "frames": []} for word in ("requested", "completed")
    ]


def test_sizes_are_in_the_units_of_the_allocator():
    events = read_snapshot(snapshot_of([SEGMENT, alloc(0x10, 1000), alloc(0x20, 1), *free(0x10, 1000)]), 0)
    assert [event.nbytes for event in events] == [1024, 512, -1024]
    assert [event.address for event in events] == [0x10, 0x20, 0x10]
    assert events[0].time_ns == 10_000


def test_history_of_another_device_is_left_out():
    assert read_snapshot(snapshot_of([alloc(0x10, 512)]), 1) == []


def test_frames_have_short_paths():
    (event,) = read_snapshot(snapshot_of([alloc(0x10, 512, LINEAR)]), 0)
    assert event.call.frames == (
        "torch/nn/modules/linear.py:134 forward", "transformers/models/llama/modeling_llama.py:480 forward",
    )  # fmt: skip
    assert "modeling_llama.py:480 forward" in str(event.call)


class Counted(Recorder):
    device_type = "cuda"

    def start(self): ...

    def position(self):
        return 0

    def stop(self): ...


def timeline_of(entries, journal_entries, positions):
    journal = Journal(Counted())
    journal.entries[:] = journal_entries
    recording = Recording("cuda:0", read_snapshot(snapshot_of(entries), 0), positions, allocator_peak_bytes=1)
    return assemble(recording, journal, "snapshot")


def test_step_on_cuda_is_put_into_the_right_categories():
    """Weights by address, the loss by its frames wherever it runs, what the backward says nothing of by its node."""
    entries = [
        SEGMENT, alloc(0x10, 4 * MIB),  # 1: weight
        alloc(0x20, 2 * MIB, LINEAR),  # 2: activation
        alloc(0x30, 8 * MIB, LOSS),  # 3: log-softmax, in a phase that no head announced
        alloc(0x40, 8 * MIB),  # 4: its gradient, from C++
        alloc(0x50, 6 * MIB, CHUNKS),  # 5: a backward in Python
        alloc(0x60, 1 * MIB, BACK),  # 6: a layer's input, back from the host
        alloc(0x70, 4 * MIB),  # 7: the weight's gradient
        alloc(0x80, 3 * MIB, GATHERED), *free(0x80, 3 * MIB),  # 8: a weight that ZeRO-3 gathers for its own backward
        *free(0x20, 2 * MIB), *free(0x30, 8 * MIB), *free(0x40, 8 * MIB), *free(0x50, 6 * MIB), *free(0x60, 1 * MIB),
        alloc(0x20, 8 * MIB),  # the address again: optimizer states
        alloc(0x30, 32 * MIB), *free(0x30, 32 * MIB), *free(0x70, 4 * MIB),
    ]  # fmt: skip
    journal = [
        Enter(0, "load", 0), Tag(1, 0x10, 4 * MIB, "weights"), Enter(1, "forward", 1, 3), Enter(2, "backward", 1),
        Node(2, "LogSoftmaxBackward0"), Node(3, "LinearCrossEntropyBackward"), Node(4, "MmBackward0"),
        Tag(5, 0x70, 4 * MIB, "gradients"), Enter(6, "optimizer", 1), Tag(7, 0x20, 8 * MIB, "optimizer"),
    ]  # fmt: skip
    # positions count allocations and releases, as the allocator does
    timeline = timeline_of(entries, journal, [0, 1, 3, 4, 5, 7, 14, 15])
    assert timeline.categories == [
        "weights", "activations", "logits", "logits", "logits", "checkpoints", "gradients", "weights", "optimizer",
        "workspace",
    ]  # fmt: skip
    peak = peak_of(timeline)
    assert peak.nbytes == 48 * MIB and peak.phase.name == "optimizer"
    nodes = [timeline.call_table[call].node for call in timeline.calls]
    assert nodes[3] == "LogSoftmaxBackward0" and nodes[5] == nodes[6] == "MmBackward0"
    assert nodes[8] == "", "the backward's last node is not the optimizer's"


def test_cublas_workspace_is_no_activation():
    timeline = timeline_of(
        [alloc(0x10, 32 * MIB, LINEAR), alloc(0x20, MIB, LINEAR), *free(0x20, MIB)], [Enter(0, "forward", 1)], [0]
    )
    assert timeline.categories == ["workspace", "activations"]


class FakeAllocator:
    """What CudaRecorder asks of torch.cuda, answered from a list of entries."""

    def __init__(self, monkeypatch):
        self.entries, self.before, self.recording = [], 7, None
        memory = torch.cuda.memory
        signature = inspect.signature(memory._record_memory_history_impl)
        for name, answer in {
            "get_allocator_backend": lambda: "native",
            "synchronize": lambda device: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: 512,
            "max_memory_allocated": lambda device: 5000,
            "memory_stats_as_nested_dict": lambda device: {"allocation": {"all": self.counts()}},
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(memory, "_snapshot", lambda: snapshot_of(self.entries))
        monkeypatch.setattr(
            memory, "_record_memory_history",
            lambda *args, **kwargs: setattr(self, "recording", signature.bind(*args, **kwargs).arguments),
        )  # fmt: skip

    def counts(self):
        """Since the process began: allocations and releases from before the recording too."""
        actions = [entry["action"] for entry in self.entries]
        return {"allocated": self.before + actions.count("alloc"), "freed": actions.count("free_requested"),
                "current": 0, "peak": 0}  # fmt: skip


def test_position_lies_between_the_events_it_was_taken_between(monkeypatch, tmp_path):
    allocator = FakeAllocator(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0), tmp_path / "snapshot.pickle")
    recorder.start()
    assert allocator.recording["enabled"] == "all" and allocator.recording["stacks"] == "python"
    recorder.position()
    allocator.entries += [SEGMENT, alloc(0x10, 1024), alloc(0x20, 1024)]
    recorder.position()
    allocator.entries += [*free(0x10, 1024)]
    recorder.position()
    recording = recorder.stop()
    assert recording.positions == [0, 2, 3]
    assert (len(recording.events), recording.base_bytes, recording.allocator_peak_bytes) == (3, 512, 5000)
    assert allocator.recording == {"enabled": None}
    written = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert set(written) >= {"segments", "device_traces"}


def test_history_that_lost_events_is_refused(monkeypatch, tmp_path):
    allocator = FakeAllocator(monkeypatch)
    recorder = CudaRecorder(torch.device("cuda", 0), tmp_path / "snapshot.pickle")
    recorder.start()
    allocator.before += 1  # counted, and not in the history
    with pytest.raises(UsageError, match="0 of 1 events; lower --steps"):
        recorder.stop()


def test_allocator_without_history_is_refused(monkeypatch, tmp_path):
    FakeAllocator(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(UsageError, match="cudaMallocAsync records no history"):
        CudaRecorder(torch.device("cuda", 0), tmp_path / "snapshot.pickle").start()


@pytest.mark.gpu
def test_recorder_and_allocator_agree_on_a_gpu(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    recorder = CudaRecorder(device, tmp_path / "snapshot.pickle")
    recorder.start()
    journal = Journal(recorder)
    kept = torch.empty(3 * MIB, device=device)
    journal.tag((kept,), "weights")
    journal.step = 1
    journal.enter("forward")
    x = torch.ones(64, 1024, device=device, requires_grad=True)
    y = (x @ torch.ones(1024, 4096, device=device)).sum()
    journal.enter("backward")
    y.backward()
    del y
    timeline = assemble(recorder.stop(), journal, "gpu")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 1000
    peak = peak_of(timeline)
    assert timeline.categories[timeline.sizes.index(12 * MIB)] == "weights"
    assert 0 <= timeline.allocator_peak_bytes - peak.nbytes <= 4 * MIB, "at most what blocks were not split for"
    assert {phase.name for phase in timeline.bands()} >= {"forward", "backward"}
    assert any("test_snapshot.py" in f for call in timeline.call_table for f in call.frames)
