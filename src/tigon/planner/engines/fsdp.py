"""PyTorch's FSDP2 as accelerate sets it up: weights, gradients and states are divided by the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tigon.models.loading.presets import PRESETS
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
    largest_layer_bytes,
    layers_of,
    load_divided,
    sharded_update,
    share,
)
from tigon.planner.engines.model_parallel import summed_bytes
from tigon.planner.request import Request
from tigon.planner.simulate.collectives import GradientCopy
from tigon.planner.simulate.generation import WholeWeights
from tigon.planner.simulate.ledger import Ledger
from tigon.planner.simulate.model_states import ModelWeights, Weight, managed_bytes, state_tensor_bytes
from tigon.planner.simulate.optimizer_cost import Parameter, cost_of
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.lora import frozen_dtype
from tigon.techniques.precision import number_format
from tigon.techniques.sharding.sharding import shard_ranks
from tigon.units import in_bytes

HOST_CALLS = 130
"""Host time per trained weight (forward, backward and step), as a number of operators. Measured on Llama-3.2-1B, 4 x
1024 on each of two H200s: step time minus the time of the operators. FSDP2's own Python accounts for 60 of them (16
tiny layers on a CPU with no-op collectives). The cause of the rest is unknown."""
TENSOR_HOST_CALLS = 420
"""The same, in addition, if a group divides the matrix: its weight and its gradient are DTensors of two dimensions for
autograd, FSDP2, clipping and the optimizer. A CPU-bound model of 21 weights took 49 ms longer on four H100s than under
FSDP2 alone (benchmarks/results/nvidia-h100/several-gpus/several-cards.json)."""


class Fsdp(Engine):
    """FSDP2, with or without offload to the host."""

    whole_weights = WholeWeights(for_generator=True, each_pass=True)

    def traced_settings(self) -> Settings:
        return computed_in_16_bits(self.settings)

    @property
    def _widening(self) -> int:
        """Shards and gradients have the dtype that the weights were loaded in, which is fp32 for amp precisions."""
        return 2 if number_format(self.settings).autocast is not None else 1

    def _widening_of(self, weight: Weight) -> int:
        """That of one weight. Beside adapters, frozen ones are loaded in the dtype of the matmuls."""
        narrow = frozen_dtype(self.settings) != number_format(self.settings).weights
        return 1 if narrow and not weight.trained else self._widening

    def placement(self, request: Request, model: ModelWeights) -> Placement:
        settings, gpus, widening = self.settings, shard_ranks(self.settings), self._widening
        wide = sum(map(self._loaded_bytes, model.weights))
        scales = model.weight_bytes - model.packed_bytes
        weights = share(widening * model.buffer_bytes + wide, gpus) + scales
        grads = share(widening * sum(weight.grad_bytes for weight in model.trained), gpus)
        shards = [
            Parameter((share(rows, gpus), *columns), widening * weight.itemsize, by_muon=weight.by_muon)
            for weight in model.trained
            for rows, *columns in (weight.shape or (1,),)
        ]
        optimizer, by_muon = cost_of(settings), self._by_muon(model)
        states = optimizer.state_bytes(shards)
        step = max(optimizer.step_peak_bytes(shards), optimizer.step_peak_bytes(by_muon))
        update_sm_s = sum(map(optimizer.sm_s, by_muon)) / gpus
        host, link = 0, 0
        loaded = widening * model.weights[0].itemsize if drawn_whole(request) else 0
        if settings.sharding.offloads:
            host, link = weights + grads + states, 3 * weights + grads
            weights = grads = states = step = 0
        return Placement(
            weights=weights,
            optimizer_tensor_bytes=_allocated_as(states, state_tensor_bytes(request, model.weights)),
            update=sharded_update(model, gpus=gpus, optimizer_bytes=states, sm_s=update_sm_s),
            step_tensor_bytes=(step,),
            gradients=Gradients(
                nbytes=grads,
                allocated="with each",
                kept=False,
                copies=self._copies(),
                # accelerate reduces only in the last micro-batch (no_sync)
                whole_until_last_micro_batch=request.micro_batches > 1,
            ),
            gathered=self._gathered(model),
            traffic=replace(self._traffic(model, link), waited=summed_bytes(request)),
            loaded_itemsize=loaded,
            managed=managed_bytes(request, model.weights),
            host=host,
        )

    def _by_muon(self, model: ModelWeights) -> list[Parameter]:
        """The whole matrices that Muon updates. Its step gathers one at a time, so it needs what a whole one needs."""
        updated = [weight for weight in model.trained if weight.by_muon and self.settings.train.optimizer == "muon"]
        return [Parameter(weight.shape, self._widening * weight.itemsize, by_muon=True) for weight in updated]

    def _gathered(self, model: ModelWeights) -> GatheredSizes:
        # Accelerate makes one unit of the last norm and lm_head. Embeddings that are not tied to it are a unit of their
        # own (fsdp2_prepare_model). What a GPU gathers in addition to its shards (FSDPParamGroup):
        # - forward: a layer twice, because the buffer that it was gathered into stays until the next unit is copied
        #   out. While a unit is copied out, its own buffer is there too;
        # - loss: the last unit twice, lm_head or the last layer. The model's forward pass frees the buffer at its end,
        #   and the backward pass gathers the last layer before the loss is differentiated;
        # - backward: a layer, the buffer of the next one, and a reduction's input, which the next reduction frees. The
        #   unit after the first layer is that of the embeddings;
        # - after the layers: the embeddings, and the last layer's reduction.
        # The unit of lm_head is freed by the norm's backward pass. If it starts with the embeddings, whose inputs have
        # no gradients, the end of the backward pass frees it. An objective's heads use lm_head until then too.
        # Gathered weights, reduced weights and gradients are allocated on separate streams.
        layer, outside = largest_layer_bytes(model), [weight for weight in model.weights if weight.layer is None]
        reduced = self._widening * max((sum(one.grad_bytes for one in layer) for layer in layers_of(model)), default=0)
        heads = [one for one in outside if one.shape == model.lm_head_shape and not one.embedding]
        embeddings = sum(one.packed_bytes for one in outside if one.embedding) if heads else 0
        tail = sum(one.packed_bytes for one in outside) - embeddings
        freed = 0 if any(one.of_objective for one in outside) else sum(one.packed_bytes for one in heads)
        before_copy = tail + layer if shard_ranks(self.settings) > 1 else 0
        if not self.settings.sharding.reshard:
            return GatheredSizes(
                both_passes=model.packed_bytes,
                backward=reduced,
                first_layer=reduced,
                last=reduced,
                before_copy=before_copy,
            )
        return GatheredSizes(
            both_passes=tail - freed,
            forward=2 * layer,
            loss=2 * freed or layer,
            loss_backward=freed + layer,
            entering=layer,
            backward=2 * layer + reduced,
            first_layer=layer + embeddings + reduced,
            last=(embeddings if freed else 0) + reduced,
            before_copy=before_copy,
        )

    def _traffic(self, model: ModelWeights, link: int) -> Traffic:
        divided = TENSOR_HOST_CALLS if self.settings.sharding.tensor > 1 else 0
        host_calls = (HOST_CALLS + divided) * len(model.trained)
        if self.gpus == 1:
            return Traffic(link=link, host_calls=host_calls)
        # Weights below the first trained one are not gathered for backward. A run whose layers are frozen gathers once.
        passes = 2 if any(weight.layer is not None for weight in model.trained) else 1
        shard_bytes = share(sum(weight.nbytes for weight in model.trained), shard_ranks(self.settings))
        step_bytes = sum(_orthogonalisation_bytes(*parameter.shape) for parameter in self._by_muon(model))
        return Traffic(
            link=link,
            # gathers, a reduction, and an all-reduce of the shards of gradients over the copies
            peers=passes * model.packed_bytes
            + sum(weight.nbytes for weight in model.trained)
            + (2 * shard_bytes if self.settings.sharding.replicas > 1 else 0)
            + step_bytes,
            # The first gathers have nothing to overlap with: the embeddings and a layer.
            peers_last=2 * embedding_grad_bytes(model) + largest_layer_bytes(model) + step_bytes,
            # gathered weights are copied out twice, gradients into the reduction's input
            copied=6 * model.packed_bytes,
            host_calls=host_calls,
            ranks=shard_ranks(self.settings),
        )

    def _copies(self) -> tuple[GradientCopy, ...]:
        """The output of a reduction, and a copy in the shard's dtype if the dtypes differ.

        The last of these is the gradient, which stays unless it goes to the host (_fsdp_collectives.py,
        foreach_reduce).
        """
        ranks = shard_ranks(self.settings)
        made = [GradientCopy(share=1 / ranks, stays=True)]
        if self._widening > 1:
            made.append(GradientCopy(share=self._widening / ranks))
        return tuple(made if self.settings.sharding.offloads else made[:-1])

    def load(self, loading: Loading) -> None:
        ledger, placement, model = loading.ledger, loading.placement, loading.model
        if not (placement.loaded_itemsize and loading.fits_whole()):
            self._load_in_units(ledger, placement, model)
            return
        whole = loading.load_whole()
        # accelerate's fsdp2_prepare_model holds the whole weights until all are sharded
        for weight in model.weights:
            ledger.alloc(share(loading.widening * weight.nbytes, shard_ranks(self.settings)), "weights")
        for tensors in whole:
            ledger.free_all(tensors)

    def _load_in_units(self, ledger: Ledger, placement: Placement, model: ModelWeights) -> None:
        """The host's weights come to the GPU unit by unit, the layers first, and are divided there.

        accelerate's fsdp2_prepare_model holds the whole embeddings and lm_head until all are divided.
        """
        layers = [sum(map(self._loaded_bytes, layer)) for layer in layers_of(model)]
        ends = [self._loaded_bytes(weight) for weight in model.weights if _is_end(weight, model)]
        outside = sum(self._loaded_bytes(weight) for weight in model.weights if weight.layer is None)
        kept = min(share(outside, shard_ranks(self.settings)), placement.weights)  # 0 if all go back to the host
        ledger.alloc(placement.weights - kept, "weights")
        ledger.alloc_briefly(max(layers, default=0), component="weights")
        ledger.alloc(kept, "weights")
        ledger.alloc_briefly(*ends, component="weights")

    def _loaded_bytes(self, weight: Weight) -> int:
        return self._widening_of(weight) * weight.packed_bytes

    def with_frozen(self, placement: Placement, frozen: Sequence[ModelWeights]) -> Placement:
        return gathering_too(placement, frozen)

    def load_frozen(self, loading: Loading) -> None:
        load_divided(loading, shard_ranks(self.settings))

    def notes(self, request: Request, model: ModelWeights) -> tuple[str, ...]:
        notes = super().notes(request, model)
        if self._by_muon(model):
            measured = "took 1.6 times their plan on two H200s with a busy host"
            notes = (*notes, f"Muon's steps on matrices that FSDP2 divides {measured}.")
        if self.settings.sharding.tensor > 1:
            notes = (*notes, "Groups that divide matrices are bound by the CPU until their matrices are very large.")
        if self.settings.lora.quantize:
            whole = in_bytes(model.weight_bytes)
            return (*notes, f"Each process holds the quantised model ({whole}) on the host until FSDP2 divides it.")
        if request.model in PRESETS:
            return notes
        gpus = self.gpus
        wide, frozen = number_format(self.settings).weights.itemsize, frozen_dtype(self.settings).itemsize
        whole_gib = gpus * sum(w.numel * (wide if w.trained else frozen) for w in model.weights) / 2**30
        return (
            *notes,
            f"Each of {gpus} processes reads the whole model to the host before FSDP2 shards it: "
            f"{whole_gib:.0f} GiB of host memory during loading.",
        )


def _is_end(weight: Weight, model: ModelWeights) -> bool:
    """Whether it is the embeddings or lm_head."""
    return weight.embedding or (weight.layer is None and weight.shape == model.lm_head_shape)


def _orthogonalisation_bytes(rows: int, columns: int) -> int:
    """Bytes that Muon's five iterations in bf16 exchange for a matrix that is divided by rows.

    PyTorch 2.13 gathers a wide matrix twice and its m x m product once per iteration. For a tall one it sums two m x m
    products over the GPUs.
    """
    short = min(rows, columns)
    return 5 * (4 * rows * columns + 2 * short**2 if rows <= columns else 8 * short**2)


def _allocated_as(nbytes: int, tensors: list[int]) -> tuple[int, ...]:
    """The tensors of optimizer state. On one GPU each weight has its own; for shards, one block represents them all."""
    return tuple(tensors) if nbytes == sum(tensors) else (nbytes,)
