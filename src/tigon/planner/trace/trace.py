"""One micro-batch through the real model code on fake tensors: every allocation from the inputs to the last gradient.

The model is transformers' model with few layers, patched like the run's model; `tape.unrolled` extends the recording to
the full depth. The trace includes the Trainer's additions: autocast, Accelerate's conversion of outputs to fp32, the
loss divided by `num_items_in_batch`, and checkpointing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tigon._trunk import decoder_layers
from tigon.errors import UsageError
from tigon.models.fp8 import patch_fp8
from tigon.models.hybrid_layers import library_among
from tigon.models.patch import patch, patch_like
from tigon.models.report import SeamsByPath
from tigon.models.seams.head.loss import causal_lm_loss
from tigon.models.tracing import attention_replaced
from tigon.objectives.base import TracedModels
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.planner.collector import collector_off
from tigon.planner.gpus import Gpu
from tigon.planner.request import Request, build, text_config
from tigon.planner.trace import (
    attention,
    cuda_autocast,
    cuda_scratch,
    liger,
    lora_adapters,
    quantized_weights,
    shared_rows,
    state_layers,
)
from tigon.planner.trace.attention_offload import TracedLayers
from tigon.planner.trace.cache.trace_key import TraceKey
from tigon.planner.trace.dispatch_recorder import HOST_CALLS, TraceRecorder
from tigon.planner.trace.known_values import KnownValues
from tigon.planner.trace.layer_pattern import layer_pattern, per_layer_lists
from tigon.planner.trace.tape import NotPeriodic, Tape, Where, unrollable, unrolled
from tigon.techniques import TECHNIQUES, model_kernels, tiling
from tigon.techniques.checkpointing import checkpointing, layer_checkpointing, layer_function
from tigon.techniques.checkpointing.checkpointing import KEPT_OPS, every_n_layers, layer_states
from tigon.techniques.keys.settings import Settings
from tigon.techniques.lora.lora import frozen_dtype, keeps_mxfp4, trained_dtype
from tigon.techniques.precision import number_format

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch._ops import OpOverload
    from transformers import PreTrainedConfig, PreTrainedModel

# Value of `kernels` -> options of the patcher; None: no patch. Liger's ops inside the layers are traced as tigon's ops
# that write in place like Liger's. liger.py has Liger's loss.
PATCH_FLAGS: Mapping[str, Mapping[str, bool] | None] = {
    "none": None,
    "no-flce": {"linear_cross_entropy": False},
    "tigon": {},
    "liger": {"linear_cross_entropy": False, "cross_entropy": False},
}
SELECTIVE_CALLS = 3
"""CPU time that selective checkpointing's dispatch modes add to each operator of a layer, as a number of operators, in
the forward pass and in the recomputation. With 16 tiny layers on a CPU it was 3.4 times an ordinary operator's."""
NF4_CALLS = 55
"""CPU time of one product with a 4-bit weight, as a number of operators (bitsandbytes 0.50.2: the Python code of
MatMul4Bit and its nested scales). It is 0.17 ms, fitted to Llama-3.2-1B's and Qwen3-0.6B's steps on an H200."""
NF4_KERNELS = 3
"""Kernels of one dequantisation: the scales, their offset, the weight (bitsandbytes 0.50.2, dequantize_4bit)."""


@dataclass(frozen=True)
class Trace:
    """The tapes of a micro-batch and of an evaluation's batch."""

    tape: Tape
    eval_tape: Tape


Record = Callable[[Request, Gpu, int, bool, bool], Trace]
"""(request, GPU, layers, whether gradients exist, whether to evaluate) -> the tapes of the first layers."""


def weight_dtype(settings: Settings, *, trained: bool, name: str = "") -> torch.dtype:
    """The dtype in which the run holds a weight. Beside adapters, frozen weights may have another than trained ones.

    name: the parameter's name, by which an adapter is known.
    """
    return trained_dtype(settings, name) if trained else frozen_dtype(settings)


def trace(
    request: Request,
    gpu: Gpu,
    *,
    accumulating: bool = False,
    whole: bool = False,
    evaluating: bool = True,
    record: Record | None = None,
) -> Trace:
    """Trace one micro-batch of `request`. accumulating: whether gradients of an earlier micro-batch exist.

    whole: trace every layer instead of repeating a few. evaluating: trace an evaluation batch too. record: makes the
    tapes of a few layers; None: `recorded`.
    Raises UsageError for a model whose forward cannot be traced without data.
    """
    record = record or recorded
    layers = int(text_config(request.config).num_hidden_layers)
    bf16_layers = request.settings.train.fp8_bf16_layers if request.settings.train.in_fp8 else 0
    if layer_checkpointing.is_by_layer(request.settings.train.checkpointing) and not whole:
        if bf16_layers:  # the groups' layers are not all of one kind
            return record(request, gpu, layers, accumulating, evaluating)
        return _trace_groups(request, gpu, accumulating, evaluating, record)
    every = every_n_layers(request.settings.train.checkpointing) or 1
    pattern = layer_pattern(request.model, request.config, every=every).between(bf16_layers)
    depth = pattern.depth(layers)
    if request.settings.train.checkpointing == checkpointing.KEPT_ON_HOST:
        depth += pattern.period  # the last layer fetches its own input, the others were fetched a layer earlier
    if whole or depth >= layers:
        return record(request, gpu, layers, accumulating, evaluating)
    shallow = record(request, gpu, depth, accumulating, evaluating)
    repeat = functools.partial(unrolled, first=pattern.start + 1, period=pattern.period, traced=depth, layers=layers)
    try:
        # An evaluation keeps nothing of its layers except autocast's 16-bit copies of their weights.
        return Trace(repeat(shallow.tape), repeat(shallow.eval_tape))
    except NotPeriodic:
        return record(request, gpu, layers, accumulating, evaluating)


def _trace_groups(request: Request, gpu: Gpu, accumulating: bool, evaluating: bool, record: Record) -> Trace:
    """Trace a model whose layers recompute differently: a few layers of each group, which are then repeated."""
    layers = int(text_config(request.config).num_hidden_layers)
    groups = layer_checkpointing.groups_of(request.settings.train.checkpointing)
    pattern = layer_pattern(request.model, request.config)
    # The layers before the pattern are traced with the first group.
    before = [pattern.start if number == 0 else 0 for number in range(len(groups))]
    if groups[0][1] <= pattern.start:
        return record(request, gpu, layers, accumulating, evaluating)
    traced = [
        min(count, alone + unrollable(count - alone, pattern.period))
        for (_, count), alone in zip(groups, before, strict=True)
    ]
    shallow = ",".join(f"{state}:{count}" for (state, _), count in zip(groups, traced, strict=True))
    settings = request.settings.having({"train.checkpointing": shallow})
    few = record(dataclasses.replace(request, settings=settings), gpu, sum(traced), accumulating, evaluating)
    depth = sum(traced)
    try:
        for number in reversed(range(len(groups))):
            deeper = depth + groups[number][1] - traced[number]
            first = sum(traced[:number]) + before[number] + 1
            repeat = functools.partial(unrolled, period=pattern.period, traced=depth, layers=deeper, first=first)
            few, depth = Trace(repeat(few.tape), repeat(few.eval_tape)), deeper
    except NotPeriodic:
        return record(request, gpu, layers, accumulating, evaluating)
    return few


def shallow_config(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of the config with the first `layers` layers."""
    shallow = copy.deepcopy(config)
    text = text_config(shallow)
    for name, values in per_layer_lists(text).items():
        setattr(text, name, values[:layers])
    text.num_hidden_layers = layers
    text.use_cache = False
    return shallow


# --- the run ---------------------------------------------------------------------------------------------------------


def recorded(
    request: Request, gpu: Gpu, layers: int, accumulating: bool, evaluating: bool, *, training: bool = True
) -> Trace:
    """The tapes of the first `layers` layers. training: whether to record the micro-batch too."""
    settings = request.settings
    inplace, host_calls = (liger.INPLACE, liger.HOST_CALLS) if settings.model.kernels == "liger" else ({}, HOST_CALLS)
    recorder = TraceRecorder(cuda_scratch.scratch_bytes(gpu.sm_count), inplace, host_calls)
    model = request.objective.attach(_model(request, layers, recorder))
    frozen = tuple(_Frozen.of(one, recorder) for one in request.frozen())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    run = _Run(request, model, recorder, accumulating, frozen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector_off())
        stack.enter_context(fake)
        run.fill()
        if settings.model.attention != "eager":
            shards = settings.sharding.sequence
            dense = settings.model.attention == "sdpa"
            mask = attention.mask_maker(masked=request.masked, dense=dense, shards=shards)
            attend = attention.attention(recorder, gpu.arch, settings.train.attention_groups)
            if shards > 1:
                attend = shared_rows.of_shards(attend, settings.sharding, recorder, gpu)
            for each in (model, *(one.model for one in frozen)):
                stack.enter_context(attention_replaced(each, attend, mask))
        ignored = request.objective.ignored_labels(request.batch)
        stack.enter_context(cuda_scratch.planned_for_cuda(recorder, arch=gpu.arch, ignored=ignored))
        if number_format(settings).autocast is not None:
            stack.enter_context(cuda_autocast.cuda_autocast())
        stack.enter_context(_foreign_code(request.model))
        stack.enter_context(cuda_scratch.no_launches())
        if training:
            run.train()
        eval_tape = run.evaluate() if evaluating else Tape()
    return Trace(recorder.tape, eval_tape)


def _model(request: Request, layers: int, recorder: TraceRecorder) -> Any:
    """The model of a request with the first `layers` layers, without weights, with its kernels and techniques."""
    settings = request.settings
    config = shallow_config(request.config, layers)
    if settings.model.attention == "eager":
        config._attn_implementation = "eager"  # of a vision tower too
    model = build(request.model, config)
    if settings.lora.quantize:
        on_dequantize = functools.partial(_count_dequantisation, recorder, keeps_mxfp4(settings))
        quantized_weights.quantize(model, settings, on_dequantize, number_format(settings).compute_dtype)
    fused_lora = settings.model.patched and request.adapters_fused
    if not request.adapters_fused:
        _patch(model, request, layers, recorder, lora=False)
    if settings.lora.used:
        lora_adapters.add_lora(model, settings, fused=fused_lora)
    if request.adapters_fused:
        _patch(model, request, layers, recorder, lora=fused_lora)
    state_layers.trace_libraries(model, recorder)
    if settings.train.in_fp8:
        patch_fp8(model, scaling=settings.train.fp8_scaling, bf16_layers=settings.train.fp8_bf16_layers)
    for technique in TECHNIQUES.values():
        technique.trace(model, settings, functools.partial(_few_tiles, recorder))
    return model


MAX_TILES = 8  # traced one by one; 64 tokens per tile would be thousands in a search for the longest row


def _few_tiles(recorder: TraceRecorder, n_tokens: int, tokens: int) -> Iterator[slice]:
    """The tiles of an MLP to trace. Of many, the first, the second and the last, and the second counts for the others.

    The first tile makes the sums of the gradients, and all tiles but the last are equal. Each frees what it holds
    before the next begins, so the memory of three tiles is that of all.
    """
    all_tiles = list(tiling.spans(n_tokens, tokens))
    if len(all_tiles) <= MAX_TILES:
        yield from all_tiles
        return
    yield all_tiles[0]
    cost = recorder.tape.segments[-1].cost
    before = dataclasses.replace(cost)
    yield all_tiles[1]
    of_one = dataclasses.replace(cost)
    before.multiply(-1)
    of_one.add(before)
    of_one.multiply(len(all_tiles) - 3)
    cost.add(of_one)
    yield all_tiles[-1]


def _count_dequantisation(recorder: TraceRecorder, by_tigon: bool, moved_bytes: int) -> None:
    if by_tigon:  # one kernel for MXFP4
        recorder.count(moved_bytes=moved_bytes)
        recorder.count_host(HOST_CALLS - 1)
        return
    recorder.count(moved_bytes=moved_bytes, launches=NF4_KERNELS)
    recorder.count_host(NF4_CALLS - NF4_KERNELS)


@dataclass
class _Frozen:
    """A model that is not trained. Its passes keep nothing of a layer, so a few layers have the memory of all.

    The cost of its layers is multiplied to that of all layers.
    """

    model: PreTrainedModel
    repeats: float
    """Layers of the model per layer of the trace."""

    @classmethod
    def of(cls, request: Request, recorder: TraceRecorder) -> _Frozen:
        text = text_config(request.config)
        layers = int(text.num_hidden_layers)
        depth = layer_pattern(request.model, request.config).depth(layers)
        model = _model(request, depth, recorder)
        return cls(model.requires_grad_(False).eval(), layers / depth)

    def watch(self, recorder: TraceRecorder, head: nn.Module) -> list[Any]:
        """Hooks that mark the layers as work outside the trained model's layers, and multiply their cost."""

        def enter(*_: object) -> None:
            recorder.mark(Where("forward"), "activations")

        def leave(*_: object) -> None:
            recorder.tape.segments[-1].cost.multiply(self.repeats)
            enter()

        layers = decoder_layers(self.model)
        handles = [layer.register_forward_pre_hook(enter) for layer in layers]
        handles += [layer.register_forward_hook(leave) for layer in layers]
        return [*handles, head.register_forward_pre_hook(lambda *_: recorder.mark(Where("loss"), "logits"))]


@contextlib.contextmanager
def _foreign_code(name: str) -> Iterator[None]:
    """Turn errors of the model's code into a UsageError. That code may read values that a fake tensor does not have, or
    call an operator that PyTorch cannot fake. PyTorch would also log a traceback; this silences it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if library := library_among(str(frame.f_globals.get("__name__")) for frame in frames):
            raise UsageError(
                f"{name}: {library} runs layers of it, and these kernels cannot be traced without data; plan it in an "
                f"environment without {library}, where the plan counts PyTorch's code."
            ) from error
        untraceable = (RuntimeError, DataDependentOutputException, DynamicOutputShapeException)
        if not isinstance(error, untraceable) and "transformers" not in Path(frames[-1].f_code.co_filename).parts:
            raise  # tigon's own error
        raise UsageError(
            f"{name}: its step cannot be traced without data ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:160]}); correct its config if that is wrong."
        ) from error
    finally:
        log.setLevel(before)


_MAX_MODELS = 64
_seams: dict[Hashable, SeamsByPath] = {}
"""What `patch` decided for a model, by everything that the model is built from."""


def _patch(model: PreTrainedModel, request: Request, layers: int, recorder: TraceRecorder, lora: bool) -> None:
    kernels = request.settings.model.kernels
    flags = PATCH_FLAGS[kernels]
    if flags is None:
        return
    # Models of equal keys have equal modules, so their numbers are compared once. That takes longer than building one.
    shapeless = dataclasses.replace(request, batch=1, seq=1)
    key: Hashable = (TraceKey(shapeless, checkpointing="none"), layers)
    if key in _seams:
        patch_like(model, _seams[key])
    else:
        while len(_seams) >= _MAX_MODELS:
            del _seams[next(iter(_seams))]
        sinks = model_kernels.sinks_flag(request.settings)
        _seams[key] = patch(model, **flags, lora=None if lora else False, attention_sinks=sinks).seams
    if kernels == "no-flce":
        model.loss_function = causal_lm_loss
    if kernels == "liger":
        liger.fuse_loss(model, recorder)


@dataclass
class _Run:
    request: Request
    model: PreTrainedModel
    recorder: TraceRecorder
    accumulating: bool
    frozen: tuple[_Frozen, ...]

    def fill(self) -> None:
        """Replace meta tensors of the models with fake CPU tensors of the run's dtypes."""
        settings = self.request.settings
        _fill(self.model, lambda name, weight: weight_dtype(settings, trained=weight.requires_grad, name=name))
        for frozen in self._models[1:]:  # a reference or a teacher is loaded in the dtype of a trained model
            _fill(frozen, lambda *_: weight_dtype(settings, trained=True))
        if self.accumulating:
            for weight in self.model.parameters():
                weight.grad = torch.empty_like(weight) if weight.requires_grad else None
        self._exclude(self.recorder)
        self.recorder.exclude(w.grad for w in self.model.parameters() if w.grad is not None)

    @property
    def _models(self) -> tuple[Any, ...]:
        return (self.model, *(one.model for one in self.frozen))

    def _exclude(self, recorder: TraceRecorder) -> None:
        """Leave the weights out of the recording."""
        for model in self._models:
            recorder.exclude(weight for weight in model.parameters())
            recorder.exclude(buffer for buffer in model.buffers())

    def train(self) -> None:
        """Forward, loss and backward of one micro-batch."""
        model, recorder = self.model, self.recorder
        model.train()
        self._checkpoint()
        handles = self._watch()
        fused = self.request.settings.train.gradient_accumulation_fusion
        try:
            with recorder, self._known(recorder), accumulation_fusion() if fused else contextlib.nullcontext():
                inputs = self._inputs()
                loss = self._loss(inputs, recorder)
                recorder.mark(Where("loss"), "logits")
                loss.backward()
                for weight in model.parameters():
                    if weight.grad is not None:
                        recorder.relabel(weight.grad, "gradients")
                recorder.mark(Where("end"), "workspace")
                del loss, inputs
            recorder.close()
        finally:
            for handle in handles:
                handle.remove()
        for weight in model.parameters():
            weight.grad = None

    def evaluate(self) -> Tape:
        """A batch of the trainer's evaluation: forward passes with labels, without gradients."""
        recorder = TraceRecorder({}, {})
        self._exclude(recorder)
        self.model.eval()
        handles = [*self._watch_forward(recorder), *self._watch_frozen(recorder)]
        try:
            with torch.no_grad(), recorder, self._known(recorder):
                for context in self.request.objective.evaluation_passes(self.model):
                    recorder.mark(Where("forward"), "activations")
                    with context:
                        self._loss(self._inputs(), recorder)
        finally:
            for handle in handles:
                handle.remove()
        recorder.close()
        return recorder.tape

    def _known(self, recorder: TraceRecorder) -> Any:
        return KnownValues(recorder) if self.request.objective.reads_values else contextlib.nullcontext()

    def _inputs(self) -> dict[str, Tensor]:
        return self.request.objective.inputs(self.request.batch, self.request.seq)

    def _loss(self, inputs: dict[str, Tensor], recorder: TraceRecorder) -> Tensor:
        frozen = tuple(one.model for one in self.frozen)
        models = TracedModels(trained=self.model, frozen=frozen, call=functools.partial(self._call, recorder))
        return self.request.objective.loss(models, inputs)

    def _call(self, recorder: TraceRecorder, forward: Callable[[], Any]) -> Any:
        """A model's call as Accelerate wraps it."""
        if recorder.where != Where("forward"):
            recorder.mark(Where("forward"), "activations")
        dtype = number_format(self.request.settings).autocast
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            outputs = forward()
        logits = getattr(outputs, "logits", None)
        if dtype and isinstance(logits, Tensor) and logits.dtype == dtype:
            outputs.logits = logits.float()
        return outputs

    def _checkpoint(self) -> None:
        kind = self.request.settings.train.checkpointing
        if kind == "none":
            return
        contexts = functools.partial(self._contexts, selective=kind == "selective")
        if states := layer_states(kind, len(decoder_layers(self.model))):
            recompute = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
            layer_checkpointing.apply(self.model, states, recompute)
            return
        if kind == checkpointing.KEPT_ON_HOST:
            layer_function.enable(self.model)
            layer_function.replace_function(self.model, TracedLayers(self.recorder, self._recomputation))
            return
        layer_function.enable(self.model, context_fn=contexts)

    def _contexts(self, selective: bool) -> tuple[Any, Any]:
        """Context managers for checkpoint()'s forward and recomputation, which also record which of the two runs."""
        if not selective:
            return contextlib.nullcontext(), self._recomputation()

        forward, again = create_selective_checkpoint_contexts(_keeps)
        return _both(self._watched(), forward), _both(self._recomputation(), _both(self._watched(), again))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self.recorder.watching_calls = SELECTIVE_CALLS
        try:
            yield
        finally:
            self.recorder.watching_calls = 0

    @contextlib.contextmanager
    def _recomputation(self) -> Iterator[None]:
        component, self.recorder.component = self.recorder.component, "activations"
        try:
            yield
        finally:
            self.recorder.component = component

    def _watch(self) -> list[Any]:
        """Hooks that mark where each layer, and the head, begins in both directions."""
        recorder, handles = self.recorder, []
        checkpointed = self.request.settings.train.recomputes
        stack = decoder_layers(self.model)
        for number, layer in enumerate(stack):
            inputs = functools.partial(self._enter_layer, number, checkpointed and _is_checkpointed(layer))
            handles.append(layer.register_forward_pre_hook(inputs, with_kwargs=True))
            handles.append(layer.register_forward_hook(functools.partial(self._leave_layer, number)))
        head = self.request.objective.head(self.model)
        handles.append(head.register_forward_pre_hook(lambda *_: recorder.mark(Where("loss"), "logits")))
        return [*handles, *self._watch_frozen(recorder)]

    def _watch_frozen(self, recorder: TraceRecorder) -> list[Any]:
        head = self.request.objective.head
        return [handle for one in self.frozen for handle in one.watch(recorder, head(one.model))]

    def _watch_forward(self, recorder: TraceRecorder) -> list[Any]:
        """Hooks that mark where each layer, and the head, begins in a forward pass without gradients."""

        def marker(where: Where, component: str) -> Callable[..., None]:
            return lambda *_: recorder.mark(where, component)

        handles = [
            layer.register_forward_pre_hook(marker(Where("forward", number), "activations"))
            for number, layer in enumerate(decoder_layers(self.model))
        ]
        head = self.request.objective.head(self.model)
        return [*handles, head.register_forward_pre_hook(marker(Where("loss"), "logits"))]

    def _enter_layer(
        self, number: int, checkpointed: bool, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._in_backward():
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        if checkpointed and torch.is_grad_enabled():
            self.recorder.relabel(hidden, "checkpoints")
        if number == 0 and hidden.requires_grad:
            hidden.register_hook(self._marker(Where("backward")))
        self.recorder.mark(Where("forward", number), "activations")

    def _leave_layer(self, number: int, layer: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if self._in_backward():
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(self._marker(Where("backward", number)))

    def _marker(self, where: Where) -> Callable[[Tensor], None]:
        return lambda _: self.recorder.mark(where, "workspace")

    @staticmethod
    def _in_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)


def _fill(model: nn.Module, dtype_of: Callable[[str, Tensor], torch.dtype]) -> None:
    """Give a model fake CPU tensors in place of meta tensors; tied weights stay tied."""
    twins: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in twins:
                    twins[id(weight)] = _twin(weight, dtype_of(f"{path}.{name}", weight))
                module._parameters[name] = twins[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _twin(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    kept = dtype if weight.is_floating_point() else weight.dtype
    return nn.Parameter(torch.empty(weight.shape, dtype=kept), requires_grad=weight.requires_grad)


def _is_checkpointed(layer: nn.Module) -> bool:
    return bool(getattr(layer, "gradient_checkpointing", False))


_KEPT = frozenset({*KEPT_OPS, attention.OPERATOR})


def _keeps(ctx: object, op: OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """The run's policy of selective checkpointing, for the operator that stands for attention in a trace."""
    return CheckpointPolicy.MUST_SAVE if op._schema.name in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
