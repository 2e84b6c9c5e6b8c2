"""Trains with FSDP2 on gloo processes of a CPU: a trainer of TRL without and with `fuse`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl_runs import Result, build, of_time

import tigon
import tigon.integrations.trl as integration
from tigon.integrations.trl.layers import layer_kinds
from tigon.models.patch import unwrap

FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}  # fmt: skip


def fsdp2_on_cpus() -> None:
    """Let Accelerate take FSDP2 for CPUs in this process, a fork: CPUs get an accelerator's name."""
    import accelerate.state as state

    class Words:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, "MULTI_CPU" if name == "MULTI_MUSA" else name)

    real, state.DistributedType = state.DistributedType, Words()


def train_sharded(kind: str, fused: bool) -> Result:
    """What one process logged in two steps, the whole gradients, and what was fused."""
    from transformers import TrainerCallback

    torch.manual_seed(7)
    trainer = build(kind, **FSDP2)
    report = integration.fuse(trainer) if fused else None
    grads: list[dict[str, Tensor]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            assert found and all(hasattr(grad, "full_tensor") for grad in found.values()), "nothing is sharded"
            grads.append({name: grad.full_tensor() for name, grad in found.items()})

    trainer.add_callback(Watch())
    torch.manual_seed(11)
    trainer.train()
    logs = [
        {key: value for key, value in entry.items() if isinstance(value, float | int) and not of_time(key)}
        for entry in trainer.state.log_history
    ]
    return Result(logs, grads, report.fused if report else [], report.unfused if report else {})


def layers_of_both(rank: int, folder: Path) -> None:
    """Write the layers of the policy and of the reference of a patched and fused DPOTrainer that has trained."""
    fsdp2_on_cpus()
    trainer = build("DPO", max_steps=1, **FSDP2)
    tigon.patch(unwrap(trainer.model))
    integration.fuse(trainer)
    trainer.train()
    torch.save([layer_kinds(unwrap(each)) for each in (trainer.model, trainer.ref_model)], folder / f"{rank}")


def both_runs(rank: int, kind: str, folder: Path) -> None:
    """Train without and with `fuse`, and write what this process found to `folder`."""
    fsdp2_on_cpus()
    for fused in (False, True):
        torch.save(vars(train_sharded(kind, fused)), folder / f"{fused}-{rank}.pt")
