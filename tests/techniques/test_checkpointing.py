"""Each way to keep less for the backward pass: the same gradient, the memory it promises, the work it repeats."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from small_llama import loss_and_gradients, small_llama

from helpers import Count
from tigon.profiler.recording.peak import PeakMeter
from tigon.techniques import TECHNIQUES
from tigon.techniques.checkpointing.checkpointing import KEPT_OPS
from tigon.techniques.keys.settings import Settings
from tigon.techniques.technique import RunInfo

transformers = pytest.importorskip("transformers")

WORDS = ("full", "every-2", "selective", "offload", "offload-attention")
CPU = torch.device("cpu")
N_LAYERS = 4


def model(word: str, *, attention: str = "sdpa", **options: Any) -> Any:
    shape = {"num_hidden_layers": N_LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1}
    return small_llama({"train.checkpointing": word}, attn_implementation=attention, **shape, **options)


def inputs(tokens: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kernels", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("word", WORDS)
def test_checkpointing_keeps_loss_and_gradients(word, kernels):
    want = loss_and_gradients(model("none", kernels=kernels))
    got = loss_and_gradients(model(word, kernels=kernels))
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=lambda text, name=name: f"{name}: {text}")


def backward_counts(word: str) -> Counter[str]:
    loss = model(word)(**inputs()).loss
    with Count() as count:
        loss.backward()
    return count.n


def test_selective_checkpointing_recomputes_norms_and_no_products():
    none, full, selective = (backward_counts(word) for word in ("none", "full", "selective"))
    products = [name for name in KEPT_OPS if full[name] or none[name]]
    assert products
    for name in products:
        assert selective[name] == none[name], name
    assert sum(full[name] - none[name] for name in products) >= 7 * N_LAYERS
    repeated = {name for name in selective if selective[name] > none[name]}
    assert any(name.startswith("tigon::") for name in repeated) or "aten::silu" in repeated, repeated


def test_every_2_recomputes_half_of_the_layers():
    none, half, full = (backward_counts(word)["aten::mm"] for word in ("none", "every-2", "full"))
    assert (half - none) * 2 == full - none > 0


def peak_bytes(word: str) -> int:
    made = model(word)
    meter = PeakMeter(CPU)
    meter.start(list(made.parameters()))
    made(**inputs(tokens=256)).loss.backward()
    return meter.stop().step_bytes


def test_peak_memory_falls_as_checkpointing_keeps_less():
    none, every, full, selective = (peak_bytes(word) for word in ("none", "every-2", "full", "selective"))
    assert full < every < none
    assert full < selective < none


@pytest.mark.gpu
@pytest.mark.parametrize("word", WORDS)
def test_checkpointing_keeps_loss_and_gradients_of_the_kernels(word):
    device = torch.device("cuda")
    want = loss_and_gradients(model("none", device=device, width=256), 512)
    got = loss_and_gradients(model(word, device=device, width=256), 512)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_offload_frees_layer_inputs_and_keeps_the_gradients():
    """Each layer moves 32 MiB to the host. Gradients equal those of recomputation without offload bit for bit.

    The embedding's gradient is the exception: PyTorch adds it up in another order each time.
    """
    device, tokens, width = torch.device("cuda"), 4096, 1024
    found = {}
    for word in ("full", "offload"):
        # eager, as SDPA's fp32 backward promises no order of its sums
        made = model(word, device=device, width=width, attention="eager")
        loss_and_gradients(made, tokens)  # the first pass allocates gradients and buffers
        made.zero_grad(set_to_none=False)
        torch.cuda.reset_peak_memory_stats()
        gradients = loss_and_gradients(made, tokens)
        # kept on the host: the second model is measured beside what is left of the first
        found[word] = ({name: t.cpu() for name, t in gradients.items()}, torch.cuda.max_memory_allocated())
        del made, gradients
        torch.cuda.empty_cache()
    for name, want in found["full"][0].items():
        rtol = 1e-5 if "embed_tokens" in name else 0
        torch.testing.assert_close(found["offload"][0][name], want, rtol=rtol, atol=1e-2 * rtol)
    input_bytes = 2 * tokens * width * 4
    # two may be on their way out, one is fetched ahead
    assert found["full"][1] - found["offload"][1] >= (N_LAYERS - 3) * input_bytes


@pytest.mark.gpu
def test_offload_copies_while_kernels_run():
    """The copies run on a side stream, so a trace has kernels during them."""
    made = model("offload", device=torch.device("cuda"), width=2048)
    for _ in range(2):
        loss_and_gradients(made, 8192)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as trace:
        loss_and_gradients(made, 8192)
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type.name == "CUDA"]
    copies = [span for span in spans if "Memcpy" in span[2] and ("DtoH" in span[2] or "HtoD" in span[2])]
    kernels = [span for span in spans if "Mem" not in span[2]]
    large = [copy for copy in copies if copy[1] - copy[0] > 100]
    assert len(large) >= 2 * (N_LAYERS - 1)
    overlapped = [c for c in large if any(k[0] < c[1] and c[0] < k[1] for k in kernels)]
    assert len(overlapped) >= len(large) // 2


def test_model_of_the_old_format_keeps_its_own_checkpointing():
    """Remote code that sets `gradient_checkpointing` on itself calls PyTorch's function by itself."""
    from tigon.errors import RecipeError

    class Old(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer, self.gradient_checkpointing = torch.nn.Linear(2, 2), False

        def _set_gradient_checkpointing(self, module: Any, value: bool = False) -> None:
            self.gradient_checkpointing = value

    old = Old(transformers.LlamaConfig())
    TECHNIQUES["checkpointing-full"].model(old, Settings.of({"train.checkpointing": "full"}), RunInfo())
    assert old.gradient_checkpointing
    with pytest.raises(RecipeError, match="offload cannot replace the checkpointing function of any layer of Old"):
        TECHNIQUES["checkpointing-offload"].model(
            Old(transformers.LlamaConfig()), Settings.of({"train.checkpointing": "offload"}), RunInfo()
        )
