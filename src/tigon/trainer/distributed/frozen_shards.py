"""FSDP2 units of a frozen model: one per decoder layer, as the trained model has.

TRL divides its reference as one unit (trl/models/utils.py: prepare_fsdp), so each process gathers the whole reference
at once. It leaves the units that the model has already.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tigon._trunk import decoder_layers


def divide_layers(model: nn.Module, accelerator: Any) -> None:
    """Make each decoder layer an FSDP2 unit with Accelerate's settings. Without FSDP2 nothing happens.

    Args:
        model: A frozen model of transformers, whole in each process.
        accelerator: The Trainer's `accelerate.Accelerator`.
    """
    if not accelerator.is_fsdp2:
        return
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            offload_policy=plugin.cpu_offload,
        )
