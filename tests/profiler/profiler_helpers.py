"""Recordings made by hand, and profiles of them."""

from __future__ import annotations

from collections.abc import Sequence

from tigon.profiler.recording.journal import Enter, Journal, Node, RawEvent, Recorder, Recording, Tag
from tigon.profiler.render.op_table import OpRow
from tigon.profiler.render.result import Predicted, Profile
from tigon.profiler.timeline.assemble import assemble
from tigon.profiler.timeline.timeline import Call, Timeline

MIB = 2**20
TRAIN = "/env/lib/python3.12/site-packages/"


class Script(Recorder):
    """A recorder that is told what happens: `script.take("w", 4)`, `script.free("w")`."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.events: list[RawEvent] = []
        self.positions: list[int] = []
        self.addresses: dict[str, int] = {}

    def start(self) -> None: ...

    def stop(self) -> Recording:
        return Recording("cpu", self.events, self.positions)

    def position(self) -> int:
        self.positions.append(len(self.events))
        return len(self.positions) - 1

    def take(self, name: str, mib: float, call: Call | None = None) -> None:
        # addresses are used again, as by an allocator
        address = 0x1000 + 0x1000 * min(set(range(99)) - {(a - 0x1000) // 0x1000 for a in self.addresses.values()})
        self.addresses[name] = address
        self._note(address, int(mib * MIB), call or Call(f"aten::{name}"))

    def free(self, *names: str) -> None:
        for name in names:
            address = self.addresses.pop(name)
            taken = next(e for e in reversed(self.events) if e.address == address)
            self._note(address, -taken.nbytes, Call())

    def _note(self, address: int, nbytes: int, call: Call) -> None:
        self.events.append(RawEvent(1_000_000 * len(self.events), address, nbytes, call))

    def tag(self, journal: Journal, name: str, category: str, mib: float = 0) -> None:
        address = self.addresses.get(name, 0xDEAD0000)
        journal.entries.append(Tag(self.position(), address, int(mib * MIB), category))


def step_by_hand() -> Timeline:
    """Load, one step with a checkpointed layer, and a second step's forward.

    In MiB: weights 4, an input kept 1, logits 8 and their gradient 8, the recomputed layer 3, a temporary 2, the
    gradient 4, optimizer states 8 and an update's temporary 4.
    """
    script = Script()
    journal = Journal(script)
    script.take("init", 2)
    script.take("w", 4)
    script.free("init")
    script.tag(journal, "w", "weights")
    journal.step = 1
    journal.enter("forward")
    script.take("hidden", 1)
    script.tag(journal, "hidden", "checkpoints")
    journal.enter("forward", 0)
    script.take("act", 3)
    script.free("act")
    journal.enter("loss")
    script.take("logits", 8, Call("aten::mm", "", ("transformers/models/llama/modeling_llama.py:480 forward",)))
    script.take("dlogits", 8, Call("aten::_log_softmax_backward_data", "LogSoftmaxBackward0"))
    script.free("logits")
    journal.enter("backward", 0)
    journal.enter("backward", 0, recomputed=True)
    script.take("again", 3)
    journal.enter("backward", 0)
    script.take("temporary", 2)
    script.take("grad", 4)
    script.free("dlogits", "again", "temporary", "hidden")
    script.tag(journal, "grad", "gradients")
    journal.enter("optimizer")
    script.take("state", 8)
    script.take("update", 4)
    script.free("update", "grad")
    journal.step = 2
    journal.enter("forward")
    script.take("next", 1)
    script.free("next")
    return assemble(script.stop(), journal, "by hand")


def profile_of(timeline: Timeline, *, predicted: bool = False, ops: Sequence[OpRow] = ()) -> Profile:
    """With a prediction that is a tenth too high throughout."""
    bare = Profile(timeline, tuple(ops), None, {"model": "by hand"})
    if not predicted:
        return bare
    from tigon.profiler.render.peak_report import phase_peaks

    return Profile(
        timeline, tuple(ops),
        Predicted(
            "by hand", {name: int(1.1 * size) for name, size in phase_peaks(timeline).items()},
            {name: int(1.1 * size) for name, size in bare.peak.components.items()},
        ),
        bare.details,
    )  # fmt: skip


def snapshot_of(entries: Sequence[dict[str, object]]) -> dict[str, object]:
    """What `torch.cuda.memory._snapshot()` returns, as far as it says what happened: torch/cuda/memory.py's docstring,
    and `pool_id`, `time_us` and `compile_context` as torch 2.11 adds them."""
    common = {"stream": 0, "pool_id": (0, 0), "compile_context": "N/A", "user_metadata": ""}
    trace = [{**common, "time_us": 10 * i, **entry} for i, entry in enumerate(entries)]
    return {
        "segments": [
            {
                "device": 0, "address": 0x7F0000000000, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
                "segment_pool_id": (0, 0), "allocated_size": 0, "active_size": 0, "requested_size": 0,
                "is_expandable": False, "frames": [],
                "blocks": [{"address": 0x7F0000000000, "size": 20 * MIB, "requested_size": 20 * MIB,
                            "state": "inactive", "frames": []}],
            }
        ],
        "device_traces": [trace, []],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }  # fmt: skip


def frame(filename: str, line: int, name: str) -> dict[str, object]:
    return {"filename": filename, "line": line, "name": name}


__all__ = ["MIB", "TRAIN", "Enter", "Node", "Script", "frame", "profile_of", "snapshot_of", "step_by_hand"]
