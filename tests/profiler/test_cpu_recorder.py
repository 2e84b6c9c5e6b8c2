"""The CPU's recorder sees every allocation once, in order, with operator, node and line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from profiler_helpers import MIB

from tigon._quiet import library_log_lines_dropped
from tigon.profiler.recording.cpu import CpuRecorder
from tigon.profiler.recording.journal import Journal, plain_tensors
from tigon.profiler.recording.peak import PeakMeter
from tigon.profiler.recording.watch import PhaseHooks, _hook_nodes
from tigon.profiler.timeline.assemble import assemble

CPU = torch.device("cpu")


def recorded(work):
    """(timeline, journal) of work(journal)."""
    recorder = CpuRecorder()
    recorder.start()
    journal = Journal(recorder)
    try:
        kept = work(journal)
    finally:
        recording = recorder.stop()
    del kept
    return assemble(recording, journal, "cpu")


def test_recording_has_sizes_order_and_scratch_memory():
    x = torch.randn(64, 4096)  # before the recording: not in it

    def work(journal):
        a = torch.empty(MIB // 4)
        journal.step = 1
        journal.enter("forward")
        b = torch.logsumexp(x, dim=-1)  # 1 MiB of scratch inside
        del a
        return b

    timeline = recorded(work)
    assert timeline.sizes[0] == MIB and timeline.phases[0].end == 1
    assert max(timeline.totals()) >= 2 * MIB, "the scratch memory is missing"
    assert timeline.totals()[-1] == 64 * 4
    assert timeline.call_table[timeline.calls[0]].op == "aten::empty"
    assert "test_cpu_recorder.py" in timeline.call_table[timeline.calls[0]].frames[0]
    scratch = timeline.sizes.index(MIB, 1)
    assert timeline.call_table[timeline.calls[scratch]].op == "aten::logsumexp"


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

    def forward(self, hidden):
        return hidden + self.down(torch.nn.functional.silu(self.up(hidden)))


class Model(torch.nn.Module):
    """A model as far as Watch looks at one; layers may be checkpointed."""

    def __init__(self, checkpointing):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head, self.checkpointing = torch.nn.Linear(64, 1000, bias=False), checkpointing

    def get_output_embeddings(self):
        return self.head

    def forward(self, hidden, labels):
        for layer in self.layers:
            if self.checkpointing:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        loss = torch.nn.functional.cross_entropy(self.head(hidden), labels)
        return SimpleNamespace(loss=loss)


def two_steps(model, optimizer, hidden, labels, watch=None):
    for _ in range(2):
        if watch:
            watch.begin_step(model)
        loss = model(hidden, labels).loss
        loss.backward()
        del loss
        if watch:
            watch.begin_optimizer()
        optimizer.step()
        if watch:
            watch.end_optimizer(optimizer)
        optimizer.zero_grad()


def watched(checkpointing, name_nodes=False):
    torch.manual_seed(0)
    hidden, labels = torch.randn(32, 64, requires_grad=True), torch.arange(32)

    def work(journal):
        model = Model(checkpointing)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with PhaseHooks(
            journal, model, list(model.layers), checkpointed=lambda _: checkpointing, name_nodes=name_nodes
        ) as w:
            two_steps(model, optimizer, hidden, labels, w)
        return model, optimizer

    return recorded(work)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recorded_peak_is_the_one_the_meter_measures(checkpointing):
    """Byte for byte: neither the frames nor the hooks allocate, free or keep anything."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(32, 64, requires_grad=True), torch.arange(32)
    meter = PeakMeter(CPU)
    meter.start(())
    model = Model(checkpointing)
    two_steps(model, torch.optim.AdamW(model.parameters(), fused=True), hidden, labels)
    expected = meter.stop().peak_bytes
    assert max(watched(checkpointing).totals()) == expected
    assert max(watched(checkpointing, name_nodes=True).totals()) == expected


def test_weights_gradients_and_optimizer_states_have_their_sizes():
    timeline = watched(checkpointing=False)
    n_bytes = 4 * (4 * 64 * 256 + 64 * 1000)
    last = list(map(dict, timeline.live_bytes()))
    assert last[-1]["weights"] == n_bytes
    assert last[-1]["optimizer"] == pytest.approx(2 * n_bytes, abs=4 * 5)  # and AdamW's step counts
    before_update = next(band.start for band in timeline.bands() if band.name == "optimizer")
    assert last[before_update]["gradients"] == n_bytes
    assert last[before_update]["activations"] == last[before_update]["logits"] == 0


def test_phases_come_in_the_order_of_the_step():
    bands = [(band.name, band.step) for band in watched(checkpointing=True).bands()]
    step = ("forward", "loss", "backward", "optimizer")
    assert bands == [("load", 0), *((name, 1) for name in step), *((name, 2) for name in step)]


def test_activation_checkpoints_and_recomputation_are_recorded():
    plain, saved = watched(checkpointing=False), watched(checkpointing=True)
    assert "checkpoints" not in plain.categories
    assert "checkpoints" in saved.categories
    recomputed = [phase for phase in saved.phases if phase.recomputed]
    assert {phase.layer for phase in recomputed} == {0, 1}
    held = [max(live["activations"] for live in timeline.live_bytes()) for timeline in (plain, saved)]
    assert held[1] < held[0]


def test_backward_is_named_by_its_autograd_nodes():
    """Hooks on the graph, used without the profiler, give the names that the profiler gives."""
    timeline = watched(checkpointing=False)
    by_profiler = [timeline.call_table[call].node for call in timeline.calls]
    assert {"LogSoftmaxBackward0", "MmBackward0", "SiluBackward0"} <= set(by_profiler)
    recorder = CpuRecorder()
    recorder.start()
    journal = Journal(recorder)
    x = torch.ones(8, 8, requires_grad=True)
    y = (x @ x).log_softmax(-1).sum()
    journal.enter("backward")
    _hook_nodes(y.grad_fn, journal)
    y.backward()
    recorder.stop()
    names = [entry.name for entry in journal.entries if hasattr(entry, "name")]
    assert names == ["load", "backward", "SumBackward0", "LogSoftmaxBackward0", "MmBackward0"]


def test_recording_neither_writes_to_stderr_nor_swallows_it(capfd):
    older = [torch.empty(1000)]

    def work(journal):
        older.clear()  # memory from before: the allocator wants to log that
        print("a warning", file=sys.stderr)

    recorded(work)
    assert capfd.readouterr().err == "a warning\n"
    with pytest.raises(RuntimeError, match="inside"), library_log_lines_dropped():
        raise RuntimeError("inside")
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_failing_run_turns_the_recorder_off():
    def work(journal):
        torch.empty(10)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        recorded(work)
    assert torch._C._len_torch_dispatch_stack() == 0
    recorded(lambda journal: torch.empty(10))


def test_tensors_inside_a_subclass_are_found():
    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, a, b):
            return torch.Tensor._make_wrapper_subclass(cls, a.shape)

        def __init__(self, a, b):
            self.a, self.b = a, b

        def __tensor_flatten__(self):
            return ["a", "b"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    a, b = torch.empty(3), torch.empty(4)
    assert [id(t) for t in plain_tensors({"x": [Pair(a, b)], "n": 1})] == [id(a), id(b)]


def test_tensors_of_another_device_are_left_out():
    """Optimizer states that live on the host have no place among a GPU's."""

    def work(journal):
        journal._recorder.device_type = "cuda"
        journal.tag((torch.empty(MIB),), "optimizer")

    timeline = recorded(work)
    assert "optimizer" not in timeline.categories
