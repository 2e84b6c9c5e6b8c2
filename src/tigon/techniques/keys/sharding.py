"""The section `sharding`."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from tigon.techniques.keys.section import CONFIG, Section, key

AUTO_METHOD, ULYSSES, RING = "auto", "ulysses", "ring"
METHODS = (AUTO_METHOD, ULYSSES, RING)


@dataclass(frozen=True, config=CONFIG)
class ShardingConfig(Section):
    """Training on several GPUs, and where weights and optimizer states are stored."""

    gpus: int = key(1, minimum=1, maximum=64)
    """Processes, one per GPU; also `--gpus`. Without a GPU they run on the CPU."""
    sequence: int = key(1, minimum=1, maximum=64, traced=True)
    """Processes that share the tokens of each row; must divide `gpus` and, with Ulysses, the model's key heads."""
    sequence_method: str = key(AUTO_METHOD, choices=METHODS, traced=True)
    """How attention sees whole rows: `ulysses` exchanges tokens for heads; `ring` passes keys and values on from
    process to process; `auto` is `ulysses` if `sequence` divides the model's heads and key heads, else `ring`."""
    tensor: int = key(1, minimum=1, maximum=64)
    """FSDP2: consecutive processes that divide each matrix of the layers, and the head by vocabulary (tensor
    parallelism); must divide `gpus` and the model's key heads."""
    zero: int = key(0, minimum=0, maximum=3)
    """DeepSpeed ZeRO stage: 1 partitions the optimizer states over the GPUs, 2 also the gradients, 3 also the
    weights."""
    fsdp: bool = key(False)
    """PyTorch FSDP2: shard weights, gradients and optimizer states over the GPUs."""
    offload: str = key("none", choices=("none", "cpu", "nvme"))
    """Offload partitioned states: `cpu`: optimizer states to host memory, and with `zero: 3` or `fsdp` the weights too;
    `nvme`: both to files, requires `zero: 3`."""
    nvme_folder: str | None = key(None, planned=False)
    """Folder for those files, on a fast local disk."""
    zero_copy_ranks: int = key(1, minimum=1, maximum=64)
    """ZeRO++ (hpZ): this many consecutive processes, such as those of one machine, keep a second copy of the 16-bit
    weights between them, and the backward pass gathers from it. Requires `zero: 3`."""
    zero_int8_weights: bool = key(False)
    """ZeRO++ (qwZ): gather weights as 8-bit integers. Requires `zero: 3` and a GPU. Two H100s ran it on one host."""
    zero_int4_gradients: bool = key(False)
    """ZeRO++ (qgZ): reduce gradients as 4-bit integers between machines. Requires `zero: 3` and a GPU; no run of
    several machines was measured."""
    replicas: int = key(1, minimum=1, maximum=1024)
    """FSDP2: copies of the sharded states (hybrid sharding). Each is divided over `gpus` / `replicas` consecutive
    processes; with as many copies as machines, weights are gathered within each machine."""
    reshard: bool = key(True)
    """FSDP2: free a layer's gathered weights after its forward pass."""

    @property
    def divides_states(self) -> bool:
        """Whether ZeRO or FSDP2 divide the optimizer's states over the processes."""
        return self.zero > 0 or self.fsdp

    @property
    def divides_weights(self) -> bool:
        """Whether a process holds only a part of the weights between steps."""
        return self.zero == 3 or self.fsdp

    @property
    def offloads(self) -> bool:
        """Whether states are kept on the host or in files."""
        return self.offload != "none"

    @property
    def processes_per_sample(self) -> int:
        """Processes that train on the same samples: they share their tokens, or divide the layers' matrices."""
        return self.sequence * self.tensor
