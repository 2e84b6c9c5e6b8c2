"""A small model whose layers run as CUDA graphs, and its training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eager_capture import eager_capture
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.techniques.accumulation.fused_embedding import fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears
from tigon.techniques.checkpointing.layer_function import enable, replace_function
from tigon.techniques.checkpointing.recompute import recomputed
from tigon.techniques.cuda_graphs import cuda_graphs
from tigon.techniques.cuda_graphs.layer_graphs import CudaCapture, LayerGraphs

transformers = pytest.importorskip("transformers")


def model_of(device: str = "cpu", recomputes: bool = True, fused: bool = False, **changes: Any) -> Any:
    """A small model. fused: with gradient accumulation fusion."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=True, **changes,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device).train()
    if fused:
        fuse_linears(model)
        fuse_embeddings(model)
    if recomputes:
        enable(model)
        replace_function(model, recomputed)
    return model


def graphed(
    device: str = "cpu", recomputes: bool = True, fused: bool = False, **changes: Any
) -> tuple[Any, LayerGraphs]:
    """The same model, whose layers run as CUDA graphs. On the CPU a replay runs the work again."""
    model = model_of(device, recomputes, fused, **changes)
    return model, graphs_of(model, recomputes)


def graphs_of(model: Any, recomputes: bool = True) -> LayerGraphs:
    new_capture = CudaCapture if model.device.type == "cuda" else lambda: eager_capture
    return cuda_graphs.graph(model, recomputes=recomputes, new_capture=new_capture)


def ids_of(batch: int, seq: int, seed: int, device: str) -> Tensor:
    return torch.randint(0, 64, (batch, seq), generator=torch.Generator().manual_seed(seed)).to(device)


def train(
    model: Any, device: str, *, steps: int = 3, micro_batches: int = 2, autocast: bool = False, set_to_none: bool = True
) -> list[Tensor]:
    """The losses and the weights of some optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for number in range(micro_batches):
            ids = ids_of(2, 16, 10 * step + number, device)
            with accumulation_fusion():  # without an effect on layers that are not fused
                with torch.autocast(device, torch.bfloat16, enabled=autocast):
                    loss = model(input_ids=ids, labels=ids).loss / micro_batches
                loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [*losses, *(p.detach() for p in model.parameters())]


def on_each_device(test: Any) -> Any:
    return pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])(test)


recomputed_or_not = pytest.mark.parametrize("recomputes", [True, False], ids=["full", "none"])
