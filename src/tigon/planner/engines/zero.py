"""DeepSpeed 0.19.8's ZeRO-1 to 3, with the bucket sizes of techniques/sharding/sharding.py (arXiv 1910.02054)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tigon.planner.engines import deepspeed_host_memory
from tigon.planner.engines.base import (
    Engine,
    GatheredSizes,
    Gradients,
    Loading,
    Placement,
    Traffic,
    computed_in_16_bits,
    drawn_whole,
    embedding_grad_bytes,
    gathering_too,
    grad_bytes,
    is_drawn,
    largest_layer_bytes,
    layers_of,
    load_divided,
    sharded_update,
    share,
)
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request
from tigon.planner.simulate.collectives import GatheringPlan, GradientCopy
from tigon.planner.simulate.generation import WholeWeights
from tigon.planner.simulate.ledger import Allocation, Ledger
from tigon.planner.simulate.model_states import ModelWeights, UpdateWork
from tigon.planner.simulate.optimizer_cost import Parameter, cost_of
from tigon.techniques.keys.settings import Settings
from tigon.techniques.precision import number_format
from tigon.techniques.sharding.deepspeed_config import gathers_layers
from tigon.techniques.sharding.sharding import are_read_in_parts
from tigon.techniques.technique import RunInfo

FP32, FP64 = 4, 8
# deepspeed/runtime/zero/config.py: elements of gathered weights that stage 3 may hold (stage3_max_live_parameters).
MAX_LIVE_ELEMENTS = 10**9
# deepspeed/runtime/zero/stage3.py, _constant_buffered_norm2: elements that are converted to fp64 at a time.
NORM_ELEMENTS = 250_000_000
# deepspeed/runtime/zero/stage_1_and_2.py, step: bytes per bf16 gradient of this GPU's part besides those of a plain
# step: an fp64 copy and its norm 18 (get_grad_norm_direct), a flat copy 4.
FLAT_STEP_BYTES = 22
# deepspeed/runtime/zero/stage3.py, step: bytes per bf16 gradient of this GPU's part besides those of a plain step.
# isinf and isnan 13 (has_overflow), an fp64 copy and its norm 18 (get_grad_norm_direct), a flat copy 4
# (_prepare_fp32_grad_for_sub_group), weights from the optimizer's copy 4 (_optimizer_step).
STEP_BYTES = 39


@dataclass(frozen=True, kw_only=True)
class _OptimizerMemory:
    """The optimizer of one rank, before offload."""

    slices: list[Parameter]
    """One flat slice of the weights that decay, and one of the others."""
    moments_bytes: int
    """The optimizer's states on the device, without the flat copy."""
    managed_bytes: int
    """The optimizer's states in unified memory."""
    step_tensor_bytes: tuple[int, ...]
    """Temporaries of the optimizer's step, bytes of each tensor."""
    step_sm_s: float

    @property
    def state_bytes(self) -> int:
        """The flat copy of the slices, and the optimizer's states."""
        return sum(piece.nbytes for piece in self.slices) + self.moments_bytes


class _Zero(Engine):
    """The common part of all stages: the optimizer works on flat slices of this GPU's part."""

    host_calls = 180
    """Host time per trained weight (forward, backward and step), as a number of operators. Measured on Llama-3.2-1B, 4
    x 1024 on each of two H200s: step time minus the time of the operators. Its cause is unknown."""

    def traced_settings(self) -> Settings:
        return computed_in_16_bits(self.settings)

    def library_bytes(self, gpu: Gpu) -> int:
        return gpu.deepspeed_bytes

    @property
    def _mixed(self) -> bool:
        return number_format(self.settings).autocast is not None

    @property
    def _optimizer_itemsize(self) -> int:
        """Bytes per element of the flat copy of this GPU's slice, on which the optimizer works at every stage.

        The copy is bf16 if the whole run is bf16, else fp32 (stage_1_and_2.py: single_partition_of_fp32_groups).
        stage3.py never takes its case without a copy, because it compares a device with a device's name.
        """
        return number_format(self.settings).weights.itemsize

    @property
    def _offloads(self) -> bool:
        return self.settings.sharding.offloads

    def _optimizer_memory(self, model: ModelWeights) -> _OptimizerMemory:
        optimizer, gpus = cost_of(self.settings), self.gpus
        elements = [
            sum(weight.numel for weight in model.trained if (len(weight.shape) >= 2) == decays)
            for decays in (True, False)
        ]
        slices = [Parameter((share(numel, gpus),), self._optimizer_itemsize) for numel in elements if numel]
        # With mixed precision, the step first converts this GPU's gradients to fp32.
        converted = share(FP32 * sum(weight.numel for weight in model.trained), gpus) if self._mixed else 0
        return _OptimizerMemory(
            slices=slices,
            moments_bytes=optimizer.state_bytes(slices),
            managed_bytes=optimizer.state_bytes(slices, place="managed"),
            step_tensor_bytes=(converted, max(self._flat_bytes(model), optimizer.step_peak_bytes(slices))),
            step_sm_s=sum(map(optimizer.sm_s, slices)),
        )

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        optimizer = self._optimizer_memory(model)
        states, step, sm_s = optimizer.state_bytes, optimizer.step_tensor_bytes, optimizer.step_sm_s
        host, nvme = optimizer.managed_bytes, 0
        if self._offloads:
            states, step, sm_s = 0, (), 0.0
            host, nvme = deepspeed_host_memory.zero_host_bytes(
                self.settings, model, optimizer.slices, optimizer.moments_bytes
            )
        return Placement(
            weights=self._weights_bytes(model),
            optimizer_tensor_bytes=(states,),
            update=self._update(model, states, sm_s),
            step_tensor_bytes=step,
            gradients=self._gradients(model),
            gathered=self._gathered(model),
            traffic=self._traffic(model),
            buckets=2 * self._bucket_bytes(model),
            buffers=self._buffer_bytes(model),
            loaded_itemsize=self._loaded_itemsize(request, model),
            host=host,
            nvme=nvme,
        )

    def _update(self, model: ModelWeights, states_bytes: int, sm_s: float) -> UpdateWork:
        gpus = self.gpus
        work = sharded_update(model, gpus=gpus, optimizer_bytes=states_bytes, sm_s=sm_s)
        passes = self._step_bytes(model) * share(sum(weight.numel for weight in model.trained), gpus)
        return replace(work, moved_bytes=work.moved_bytes + passes)

    def _step_bytes(self, model: ModelWeights) -> int:
        """Bytes that DeepSpeed's step moves per gradient of this GPU's part, besides those of a plain step."""
        return FLAT_STEP_BYTES

    def _flat_bytes(self, model: ModelWeights) -> int:
        """A flat copy of this GPU's gradients, while the gradients are still held too."""
        return 0

    def _weights_bytes(self, model: ModelWeights) -> int:
        return model.weight_bytes

    @abstractmethod
    def _gradients(self, model: ModelWeights) -> Gradients: ...

    def _gathered(self, model: ModelWeights) -> GatheredSizes:
        return GatheredSizes()

    def _bucket_bytes(self, model: ModelWeights) -> int:
        hidden = model.lm_head_shape[1]
        return max(hidden**2, 2**16) * number_format(self.settings).compute_dtype.itemsize

    def _buffer_bytes(self, model: ModelWeights) -> int:
        # temp_grad_buffer_for_gpu_offload has the length of the largest weight
        return max(weight.numel * weight.itemsize for weight in model.trained) if self._offloads else 0

    def _loaded_itemsize(self, request: Request, model: ModelWeights) -> int:
        return FP32 if self._mixed else self._optimizer_itemsize

    def _traffic(self, model: ModelWeights) -> Traffic:
        grads, gpus = grad_bytes(model), self.gpus
        return Traffic(
            link=self._link_bytes(model) if self._offloads else 0,
            peers=self._peer_bytes(model) if gpus > 1 else 0,
            peers_last=self._last_peer_bytes(model) if gpus > 1 else 0,
            copied=2 * grads + 2 * share(grads, gpus),
            host_calls=self._host_calls(model),
            ranks=gpus,
        )

    def _host_calls(self, model: ModelWeights) -> int:
        return self.host_calls * len(model.trained)

    def _link_bytes(self, model: ModelWeights) -> int:
        """Bytes to and from the host in a step with offload: gradients out and weights in."""
        return 2 * share(grad_bytes(model), self.gpus)

    def _peer_bytes(self, model: ModelWeights) -> int:
        return 2 * grad_bytes(model)

    def _last_peer_bytes(self, model: ModelWeights) -> int:
        """The last reduction, and the weights, which are gathered after the optimizer's step."""
        return embedding_grad_bytes(model) + sum(weight.nbytes for weight in model.trained)

    def load(self, loading: Loading) -> None:
        whole = loading.load_whole()
        self._cast(loading, whole)
        self._flatten(loading.ledger, loading.model, whole)

    @staticmethod
    def _cast(loading: Loading, whole: list[list[Allocation | None]]) -> None:
        """DeepSpeed's engine casts wider weights to 16 bits, one by one."""
        if loading.widening == 1:
            return
        for number, weight in enumerate(loading.model.weights):
            wide, whole[number] = whole[number], [loading.ledger.alloc(weight.nbytes, "weights")]
            loading.ledger.free_all(wide)

    @staticmethod
    def _flatten(ledger: Ledger, model: ModelWeights, whole: list[list[Allocation | None]]) -> None:
        """One flat tensor of weights per parameter group of the optimizer (stage_1_and_2.py)."""
        for decays in (True, False):
            group = [number for number, weight in enumerate(model.weights) if (len(weight.shape) >= 2) == decays]
            ledger.allocator.release()
            ledger.alloc(sum(model.weights[number].nbytes for number in group), "weights")
            for number in group:
                ledger.free_all(whole[number])
        ledger.allocator.release()


class Zero1(_Zero):
    """Divides the optimizer states. Gradients stay where the backward pass computes them."""

    def _gradients(self, model: ModelWeights) -> Gradients:
        return Gradients(allocated="with the first", kept=True)


class Zero2(_Zero):
    """Divides gradients too."""

    def _gradients(self, model: ModelWeights) -> Gradients:
        # grads_in_partition: this GPU's slice is copied into one tensor when the first bucket is reduced.
        nbytes = 0 if self._offloads else share(grad_bytes(model), self.gpus)
        return Gradients(nbytes=nbytes, allocated="with the first", kept=False)

    def _flat_bytes(self, model: ModelWeights) -> int:
        return share(grad_bytes(model), self.gpus)


class Zero3(_Zero):
    """Divides weights too, and gathers them layer by layer."""

    whole_weights = WholeWeights(for_generator=True, for_transformers=True)
    host_calls = 680  # the hooks gather and release each weight; also fits one H200 with states on the host
    host_calls_of_pass = (host_calls - _Zero.host_calls) // 3
    """Host time per weight in one pass of a model whose hooks gather each weight: forward, recomputed, backward."""
    host_calls_of_unit = 385
    """Host time per unit that is gathered at once, a layer or a weight outside the layers, if the hooks gather whole
    layers. A CPU-bound model with five units took 10.6 ms longer than under ZeRO-2 on the same H100s."""
    _by_trl = False
    """Whether TRL's trainer trains, which leaves each module its hooks. `placement` reads it from the request."""

    def _step_bytes(self, model: ModelWeights) -> int:
        """The number of `host_calls` holds these passes if weights are gathered one by one."""
        return STEP_BYTES if self._gathers_layers(model) else 0

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        self._by_trl = "train.objective" in request.objective.recipe_keys()
        return super().placement(request, model)

    def _gathers_layers(self, model: ModelWeights) -> bool:
        of_model = not any(weight.of_objective for weight in model.weights) and len(model.trained) == len(model.weights)
        shapes = {weight.name: weight.shape for weight in model.weights}
        return gathers_layers(self.settings, RunInfo(shapes=shapes, processes=self.gpus, runs_layers_once=of_model))

    def _host_calls(self, model: ModelWeights) -> int:
        if self._by_trl or not self._gathers_layers(model):  # under TRL each module has its hooks
            return super()._host_calls(model)
        units = len(layers_of(model)) + sum(weight.layer is None for weight in model.weights)
        return _Zero.host_calls * len(model.trained) + self.host_calls_of_unit * units

    def _bucket_bytes(self, model: ModelWeights) -> int:
        nbytes = super()._bucket_bytes(model)
        return max(nbytes, largest_layer_bytes(model)) if self._gathers_layers(model) else nbytes

    def with_frozen(self, placement: Placement, frozen: Sequence[ModelWeights]) -> Placement:
        """The hooks of each frozen model gather its weights one by one, in one pass of the three of a trained model."""
        if not frozen:
            return placement
        calls = sum(self.host_calls_of_pass * len(model.weights) for model in frozen)
        traffic = replace(placement.traffic, host_calls=placement.traffic.host_calls + calls)
        return gathering_too(replace(placement, traffic=traffic), frozen)

    def load_frozen(self, loading: Loading) -> None:
        load_divided(loading, self.gpus)

    def _weights_bytes(self, model: ModelWeights) -> int:
        if self._offloads:
            return 0
        sharding = self.settings.sharding
        # hpZ: a second copy, divided over fewer processes
        copy = share(model.weight_bytes, sharding.zero_copy_ranks) if sharding.zero_copy_ranks > 1 else 0
        return share(model.weight_bytes, self.gpus) + copy

    def _gradients(self, model: ModelWeights) -> Gradients:
        if self._offloads:
            return Gradients(kept=False, copies=self._copies(model))
        # grad_partitions_flat_buffer exists from the start
        return Gradients(nbytes=share(grad_bytes(model), self.gpus), kept=False)

    def _copies(self, model: ModelWeights) -> tuple[GradientCopy, ...]:
        """Copies of a gradient if the states are offloaded. This GPU's part goes to the host and back.

        It is converted part by part to fp64 for its norm, and to fp32 for the optimizer (stage3.py: partition_grads,
        _constant_buffered_norm2, _offload_grad_partition_at_boundary).
        """
        itemsize, gpus = model.weights[0].itemsize, self.gpus
        return (
            GradientCopy(share=1 / gpus, stays=True),
            GradientCopy(share=FP64 / itemsize / gpus, most_bytes=FP64 * NORM_ELEMENTS),
            GradientCopy(share=FP32 / itemsize / gpus),
        )

    def _gathered(self, model: ModelWeights) -> GatheredSizes:
        settings, layers = self.settings, layers_of(model)
        outside = [weight for weight in model.weights if weight.layer is None]
        non_allocator_bytes = sum(weight.nbytes for weight in outside)
        largest = max(layers, key=lambda weights: sum(weight.nbytes for weight in weights), default=[])
        largest_weight = max(weight.nbytes for weight in model.weights)
        # The NVMe configuration sets stage3_max_reuse_distance to 0, so no weights stay gathered for later layers.
        keeps = settings.sharding.offload != "nvme"
        live = MAX_LIVE_ELEMENTS * model.weights[0].itemsize if keeps else 0
        plan = GatheringPlan(
            outside=[weight.nbytes for weight in outside],
            layer=[weight.nbytes for weight in largest],
            layers=len(layers),
            # at least the largest unit that is gathered at once: a layer, or all weights outside the layers
            most_bytes=min(model.weight_bytes, max(live, non_allocator_bytes, largest_layer_bytes(model))),
            # The embeddings are the last weight to be prefetched. With tiled MLPs there is already room for them; see
            # the peaks in benchmarks/results/nvidia-h200/study/largest-batch.json.
            beyond_bytes=largest_weight if keeps and not settings.train.mlp_tile_tokens else 0,
            last=[weight.nbytes for weight in outside if weight.embedding],
            head_stays=settings.model.kernels == "liger",  # its loss reads lm_head's weight outside the lm_head module
        )
        # To register a hook on its gradient, stage 3 gathers each weight once: its partition and the whole weight.
        return GatheredSizes(by_layer=plan, registered=(largest_weight // self.gpus, largest_weight))

    def _buffer_bytes(self, model: ModelWeights) -> int:
        return 0

    def _loaded_itemsize(self, request: Request, model: ModelWeights) -> int:
        if drawn_whole(request):
            return super()._loaded_itemsize(request, model)
        # DeepSpeed moves weights that it did not load to the GPU in 16 bits before it partitions any of them.
        whole = request.objective.reads_whole_weights
        in_parts = are_read_in_parts(self.settings, reads_whole_weights=whole) and not is_drawn(request)
        return 0 if in_parts or self.settings.lora.quantize else model.weights[0].itemsize

    def _link_bytes(self, model: ModelWeights) -> int:
        return super()._link_bytes(model) + 3 * share(model.weight_bytes, self.gpus)

    def _peer_bytes(self, model: ModelWeights) -> int:
        """Two gathers and a reduction. qwZ halves a gather. qgZ sends a quarter twice: within and between machines."""
        sharding, nbytes = self.settings.sharding, grad_bytes(model)
        gathers = nbytes if sharding.zero_int8_weights else 2 * nbytes
        return gathers + (nbytes // 2 if sharding.zero_int4_gradients else nbytes)

    def _last_peer_bytes(self, model: ModelWeights) -> int:
        """The last reduction, and the first gathers: the embeddings and a layer."""
        return 2 * embedding_grad_bytes(model) + largest_layer_bytes(model)

    def load(self, loading: Loading) -> None:
        ledger, placement, model = loading.ledger, loading.placement, loading.model
        # this GPU's part of the first weight is there beside all whole weights; each later part, beside fewer
        first_part = 0 if self._offloads else share(model.weights[0].nbytes, self.gpus)
        if placement.loaded_itemsize and loading.fits_whole():
            whole = loading.load_whole(for_the_host=self._offloads)
            self._cast(loading, whole)
            ledger.alloc_briefly(first_part, component="weights")
            for tensors in whole:
                ledger.free_all(tensors)
        elif placement.loaded_itemsize:
            # DeepSpeed moves all weights before it partitions any.
            ledger.alloc_briefly(*(weight.nbytes for weight in model.weights), first_part, component="weights")
        ledger.alloc(placement.weights, "weights")
