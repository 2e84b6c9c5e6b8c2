"""The trace of an experts call counts the products of its sorted tokens."""

from __future__ import annotations

import pytest
import torch
from planner_helpers import H200
from torch._subclasses.fake_tensor import FakeTensorMode

from tigon.ops import experts
from tigon.planner.trace.cuda_scratch import planned_for_cuda, scratch_bytes
from tigon.planner.trace.dispatch_recorder import EXPERT_TILE_ROWS, TraceRecorder

T, K, E, H, F = 64, 2, 8, 128, 32
SLOTS, PADDED = T * K, T * K + E * EXPERT_TILE_ROWS // 2  # each expert's last tile is half empty


def traced_flops(shapes: dict[str, tuple[int, ...]], frozen: tuple[str, ...]) -> float:
    """The operations of a forward and backward pass over experts of these shapes."""
    recorder = TraceRecorder(scratch_bytes(H200.sm_count), {})
    with FakeTensorMode(), planned_for_cuda(recorder, arch=H200.arch, ignored=0):
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16, requires_grad=name not in frozen)
            for name, shape in shapes.items()
        }
        index = torch.empty(T, K, dtype=torch.int64)
        weights = torch.empty(T, K, dtype=torch.bfloat16, requires_grad=True)
        with recorder:
            found = experts(top_k_index=index, top_k_weights=weights, **tensors)
            found.backward(torch.empty_like(found))
    return sum(segment.cost.flops for segment in recorder.tape.segments)


@pytest.mark.parametrize(
    ("frozen", "products", "gradients"),
    # Of size H · F: gate and up are two, down is one; each has a gradient of its input and one of its weight.
    [((), 3 + 3, 3), (("gate_up", "down"), 3 + 3, 0), (("hidden",), 3 + 1, 3)],
    ids=["all", "frozen weights", "frozen hidden"],
)
def test_each_requested_gradient_adds_its_product(frozen: tuple[str, ...], products: int, gradients: int) -> None:
    shapes = {"hidden": (T, H), "gate_up": (E, 2 * F, H), "down": (E, H, F)}
    assert traced_flops(shapes, frozen) == 2 * H * F * (PADDED * products + SLOTS * gradients)


def test_adapters_add_their_thin_products() -> None:
    rank = 4
    shapes = {
        "hidden": (T, H), "gate_up": (E, 2 * F, H), "down": (E, H, F), "gate_up_lora_a": (E, rank, H),
        "gate_up_lora_b": (E, 2 * F, rank), "down_lora_a": (E, rank, F), "down_lora_b": (E, H, rank),
    }  # fmt: skip
    # Each of the four matrices: one product forward, one for the gradient of its input, one for its own.
    thin = rank * (H + 2 * F + F + H)
    flops = traced_flops(shapes, ("gate_up", "down"))
    assert flops == 2 * (PADDED * (6 * H * F + 2 * thin) + SLOTS * thin)


@pytest.mark.parametrize("stored_as", ["nf4", "mxfp4"])
def test_experts_in_4_bits_are_planned_as_they_are_stored(stored_as: str) -> None:
    from tigon.models.verification.tiny import tiny_config
    from tigon.planner.request import Request
    from tigon.planner.search.option import estimate_option
    from tigon.planner.simulate.model_states import model_weights
    from tigon.planner.trace.quantized_weights import TENSOR_BYTES_BY_FORMAT
    from tigon.techniques.keys.settings import Settings

    pytest.importorskip("peft")
    config = tiny_config("qwen3_moe", {"num_experts": 64, "hidden_size": 256, "moe_intermediate_size": 256})
    config.use_cache = False
    targets, peaks = ("linear", "experts"), {}
    for quantized in (False, True):
        settings = Settings.of(
            {
                "train.precision": "amp-bf16",
                "lora.rank": 2,
                "lora.targets": targets,
                "lora.quantize": quantized,
                "lora.quantize_to": stored_as,
            }
        )
        request = Request(model="tiny", config=config, batch=1, seq=64, settings=settings)
        peaks[quantized] = estimate_option(request, H200).estimate.peak_allocated_bytes
        found = [w for w in model_weights(request).weights if len(w.shape) == 3]
        assert len(found) == 2 * config.num_hidden_layers and not any(weight.trained for weight in found)
        if quantized:
            assert all(weight.stored_as == stored_as for weight in found)
            others = [w for w in model_weights(request).weights if len(w.shape) == 2 and not w.trained]
            assert any(weight.stored_as for weight in others) == (stored_as == "nf4")
            numel = [64 * 512 * 256, 64 * 256 * 256]
            for weight in found:
                tensor_bytes = sum(TENSOR_BYTES_BY_FORMAT[stored_as](weight.numel))
                assert weight.numel in numel and 0 <= weight.nbytes - tensor_bytes < 4 * 512
            experts_bytes = sum(2 * weight.numel for weight in found)
    # One projection of one layer is dense at a time.
    saved = peaks[False] - peaks[True]
    assert experts_bytes - 2 * max(numel) - experts_bytes / 3 < saved < 0.75 * experts_bytes
