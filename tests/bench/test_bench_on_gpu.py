"""What only a GPU has: graphs, host time, memory kept, and the peers that are installed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.peers import CATALOGUE
from tigon.bench import timing
from tigon.bench.measure import Setting, measure_row
from tigon.bench.rows import row
from tigon.bench.timing import Graphs

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(
    "case",
    [row("rms_norm", 512, 1024), row("rope", 1, 8, 64, 64, options={"kv_heads": 2}), row("cross_entropy", 64, 4096)],
    ids=lambda case: case.op,
)
def test_row_on_a_gpu_has_graph_times_host_time_and_memory(case, device):
    ceilings = {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0, "matmul_size": 8192}
    setting = Setting(dtype=torch.bfloat16, device=device, repetitions=3, ceilings=ceilings)
    record = measure_row(case, CATALOGUE.of_row(case, CATALOGUE.names()), setting)
    for m in record.measurements:
        print(m.impl, m.status, m.detail, m.graph_detail)
    tigon = record.measurements[0]
    assert tigon.status == "ok" and tigon.graph_ms is not None and tigon.host_us is not None
    assert tigon.kept_bytes is not None and tigon.extra_peak_bytes is not None
    assert tigon.eager_ms is not None and tigon.eager_ms["both"].median > 0
    compiled = next(m for m in record.measurements if m.impl == "compile")
    assert compiled.status == "ok" and compiled.graph_ms is not None


def test_allocator_works_after_a_failed_graph_capture(device):
    graphs = Graphs(device)
    x = torch.ones(4, device=device)
    with pytest.raises(Exception, match=r".+"):
        graphs.capture(lambda: x.sum().item())
    timing.release(device)
    replay = graphs.capture(lambda: x.add_(1))
    before = float(x[0])
    replay()
    assert float(x[0]) == before + 1
