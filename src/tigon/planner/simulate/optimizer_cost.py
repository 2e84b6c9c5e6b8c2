"""What each optimizer costs: the exact bytes of its state and of its temporaries, and the work of its step.

Sizes are functions of a parameter's shape and dtype, read from the source of the package (PyTorch 2.11 to 2.13,
bitsandbytes 0.50.2, torchao 0.18, transformers 5.17). tests/planner/test_optimizer_cost.py checks them against the
optimizers. They are bytes of tensors; the CUDA allocator rounds each tensor up to a multiple of 512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from tigon.techniques.keys.settings import Settings
from tigon.techniques.optimizers import galore

BNB_MIN_8BIT = 4096  # elements below which bitsandbytes keeps fp32 states
BNB_MIN_PAGED = 100_000  # elements below which its paged optimizers allocate on the device after all
BLOCK = 256  # elements that share a scale in bitsandbytes, and in torchao as Trainer constructs it
FP32 = 4


class Parameter(NamedTuple):
    """The properties of a trained parameter on which an optimizer's size depends."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element: 4 under `fp32`, `amp-bf16` and `amp-fp16`, 2 under `bf16`."""
    projected: bool = False
    """It is the weight of a linear layer other than the head. GaLore projects these."""
    by_muon: bool = False
    """It is the weight of a linear layer inside the decoder layers. Muon updates these."""
    embedding: bool = False
    """It is the weight of an embedding, tied or not. Trainer tells bitsandbytes to keep its states in fp32."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


class StateTensor(NamedTuple):
    """One tensor of an optimizer's state."""

    nbytes: int
    place: str = "device"
    """`device`: PyTorch's allocator; `managed`: CUDA unified memory, which moves to the host under pressure and does
    not appear in PyTorch's statistics."""


PerParameter = Callable[[Parameter, int], int]
"""(parameter, GaLore's rank) -> bytes. Only GaLore uses the rank."""
States = Callable[[Parameter, int], tuple[StateTensor, ...]]
"""(parameter, GaLore's rank) -> the tensors of its state."""


def _nothing(parameter: Parameter, rank: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """The cost of one optimizer."""

    states: States
    shared_bytes: int = 0
    """Bytes of state that exist once for all parameters, such as quantisation maps."""
    temporaries: PerParameter = _nothing
    """Bytes of temporaries in one parameter's update."""
    leaves: PerParameter = _nothing
    """Bytes of these temporaries that still live during the next parameter's update."""
    holds_all: bool = False
    """Whether the temporaries of all parameters live at the same time, as with foreach; otherwise those of one."""
    moves: PerParameter | None = None
    """Bytes of device memory that one parameter's update reads and writes, summed over its ops; None: a single pass
    over weight, gradient and states."""
    calls: int = 0
    """Ops that the host launches per parameter, if it updates parameters one by one."""
    waits: bool = False
    """The host waits for the GPU after each parameter, so the times of both add up."""
    sm_s: Callable[[Parameter], float] = lambda parameter: 0.0
    """Seconds that one multiprocessor computes for a parameter's update, beyond the time for its bytes."""
    rank: int = 0
    """GaLore's rank."""

    def state_tensors(self, parameter: Parameter) -> tuple[StateTensor, ...]:
        """Returns the state of one parameter, tensor by tensor."""
        return self.states(parameter, self.rank)

    def state_bytes(self, parameters: Iterable[Parameter], *, place: str = "device") -> int:
        """Returns the bytes of state of all `parameters` at `place`, including shared tables."""
        shared = self.shared_bytes if place == "device" else 0
        tensors = (tensor for parameter in parameters for tensor in self.state_tensors(parameter))
        return shared + sum(tensor.nbytes for tensor in tensors if tensor.place == place)

    def step_tensor_bytes(self, parameters: Iterable[Parameter]) -> list[int]:
        """Returns the bytes of the temporaries of each parameter's update."""
        return [self.temporaries(parameter, self.rank) for parameter in parameters]

    def step_peak_bytes(self, parameters: Iterable[Parameter]) -> int:
        """Returns the most bytes that the step adds to weights, gradients and states."""
        parameters = list(parameters)
        each = self.step_tensor_bytes(parameters)
        if self.holds_all:
            return sum(each)
        left = [0, *(self.leaves(parameter, self.rank) for parameter in parameters)]
        return max(map(sum, zip(each, left, strict=False)), default=0)

    def moved_bytes(self, parameters: Iterable[Parameter]) -> int:
        """Returns the bytes that the step reads and writes."""
        parameters = list(parameters)
        if self.moves is not None:
            return sum(self.moves(parameter, self.rank) for parameter in parameters)
        states = self.state_bytes(parameters) + self.state_bytes(parameters, place="managed")
        return sum(3 * parameter.nbytes for parameter in parameters) + 2 * states


# --- the shapes of states --------------------------------------------------------------------------------------------


def _moments(count: int, *, step_on_device: bool = False) -> States:
    """`count` tensors of the parameter's shape and dtype."""

    def states(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
        moment = StateTensor(parameter.numel * parameter.itemsize)
        return (moment,) * count + ((StateTensor(FP32),) if step_on_device else ())

    return states


def _bnb_quantises(parameter: Parameter) -> bool:
    return parameter.numel >= BNB_MIN_8BIT and not parameter.embedding


def _bnb(count: int, *, bits: int, paged: bool) -> States:
    """The state of bitsandbytes' optimizers: `count` moments of `bits` bits, and an fp32 scale per 256 8-bit elements.

    bitsandbytes==0.50.2 optim/optimizer.py: init_state, get_state_buffer; transformers==5.17 Trainer.create_optimizer
    registers every embedding with 32 bits.
    """

    def states(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
        n = parameter.numel
        quantised = bits == 8 and _bnb_quantises(parameter)
        place = "managed" if paged and n >= BNB_MIN_PAGED else "device"
        moment = StateTensor(n * (1 if quantised else FP32), place)
        scale = StateTensor(FP32 * math.ceil(n / BLOCK))
        return (moment,) * count + ((scale,) * count if quantised else ())

    return states


def _ademamix(*, bits: int, paged: bool) -> States:
    """The state of AdEMAMix: `_bnb` with three moments, of which the two averages of the gradient are one tensor.

    bitsandbytes==0.50.2 optim/ademamix.py: init_state.
    """
    single = _bnb(1, bits=bits, paged=paged)

    def states(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
        tensors = single(parameter, rank)
        return (*tensors, *(StateTensor(2 * tensor.nbytes, tensor.place) for tensor in tensors))

    return states


def _torchao_quantises(parameter: Parameter) -> bool:
    return parameter.numel >= BNB_MIN_8BIT and parameter.numel % BLOCK == 0


def _torchao(bits: int) -> States:
    """The state of torchao's optimizers: two moments, each with its own scales and its own quantisation map.

    torchao==0.18.0 optim/adam.py: _new_buffer; Trainer passes block_size 256 for both widths.
    """

    def states(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
        n = parameter.numel
        if not _torchao_quantises(parameter):
            return (StateTensor(parameter.nbytes),) * 2
        codes, scale, levels = StateTensor(n * bits // 8), StateTensor(FP32 * n // BLOCK), StateTensor(FP32 * 2**bits)
        return (codes, scale, levels) * 2

    return states


def _adafactor(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
    """Second moments in fp32, whatever the parameter's dtype: a row and a column for a matrix, all for a vector."""
    *rows, columns = parameter.shape or (1,)
    rms = StateTensor(FP32)
    if not rows:
        return StateTensor(FP32 * columns), rms
    return StateTensor(FP32 * math.prod(rows)), StateTensor(FP32 * math.prod((*rows[:-1], columns))), rms


def _is_projected(parameter: Parameter, rank: int) -> bool:
    return parameter.projected and galore.projects(parameter.shape, rank)


def _galore(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
    """For (m, n) in its dtype: a min(m, n) x r projection and two r x max(m, n) moments (arXiv 2403.03507 §4.2)."""
    if not _is_projected(parameter, rank):
        return (StateTensor(parameter.nbytes),) * 2
    short, long = sorted(parameter.shape)
    return (
        StateTensor(short * rank * parameter.itemsize),
        *(StateTensor(long * rank * parameter.itemsize),) * 2,
    )


def _muon(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
    """One momentum for the matrix of a linear layer; AdamW's two for another weight."""
    if parameter.by_muon:
        return (StateTensor(parameter.nbytes),)
    return _moments(2, step_on_device=True)(parameter, rank)


# --- the shapes of temporaries ---------------------------------------------------------------------------------------


def _like_parameter(parameter: Parameter, rank: int) -> int:
    return parameter.nbytes


def _adafactor_step(parameter: Parameter, rank: int) -> int:
    """The gradient's square and its sum with epsilon, in fp32; below fp32 also copies of gradient and weight.

    transformers==5.17 optimization.py, Adafactor.step: the variable for the previous parameter's update is still bound.
    """
    return parameter.numel * FP32 * (2 if parameter.itemsize == FP32 else 4)


def _fp32_copy(parameter: Parameter, rank: int) -> int:
    return parameter.numel * FP32


def _foreach_moves(parameter: Parameter, rank: int) -> int:
    """torch.optim.adam: _multi_tensor_adam. Reads and writes per op: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, two
    divisions and sums of 2 each, addcdiv 4."""
    return 20 * parameter.nbytes


def _schedule_free_moves(parameter: Parameter, rank: int) -> int:
    """schedulefree 1.4.1: AdamWScheduleFree.step with foreach. Reads and writes per op: mul 2, addcmul 3, div 2, sqrt
    2, add 2, div 3, decay 3, lerp 3, and two sums of 3 each."""
    return 26 * parameter.nbytes


def _sgd_moves(parameter: Parameter, rank: int) -> int:
    """torch.optim.sgd: _multi_tensor_sgd. Weight decay, added into a copy, and the update: 3 each."""
    return 6 * parameter.nbytes


def _adafactor_moves(parameter: Parameter, rank: int) -> int:
    """21 reads and writes in fp32. In 16 bits, casts of gradient and weight and the copy back are added."""
    return parameter.numel * (21 * FP32 if parameter.itemsize == FP32 else 26 * FP32)


def _galore_moves(parameter: Parameter, rank: int) -> int:
    """31 reads and writes of Adam's tensors in fp32. A projected weight's gradient and update add 9."""
    if not _is_projected(parameter, rank):
        return parameter.numel * 31 * FP32
    whole = 9 * FP32 if parameter.itemsize == FP32 else 30
    return parameter.numel * whole + rank * max(parameter.shape) * 31 * FP32


def _layerwise_moves(parameter: Parameter, rank: int) -> int:
    """`_galore_moves`, and one read of the gradient to find values that are not finite."""
    return _galore_moves(parameter, rank) + parameter.nbytes


# The blockwise 8-bit kernel looks each new state up in a table of 256 values (bitsandbytes, csrc/kernels.cu), so it is
# compute-bound. On an H200, steps with 1.0e9 and 7.5e9 8-bit elements took 25 and 178 ms longer than their bytes. The
# constant is for one of its 132 multiprocessors.
_BNB_8BIT_SM_S = 24e-12 * 132


def _bnb_8bit_sm_s(parameter: Parameter) -> float:
    return parameter.numel * _BNB_8BIT_SM_S if _bnb_quantises(parameter) else 0.0


def _ademamix_8bit_sm_s(parameter: Parameter) -> float:
    return 1.5 * _bnb_8bit_sm_s(parameter)  # three states instead of two; no GPU has measured it


def _lion_8bit_sm_s(parameter: Parameter) -> float:
    return _bnb_8bit_sm_s(parameter) / 2  # one state instead of two


def _galore_step(parameter: Parameter, rank: int) -> int:
    """Both moments in fp32 of the elements that are updated at a time, below fp32 with copies of their old values.

    In a subspace, the largest of three: the moments and the projected gradient; the weight's change, the gradient and
    the update; and, when the subspace is chosen, an fp32 copy of the whole gradient with the range finder's products.
    """
    below_fp32 = parameter.itemsize < FP32
    turn = min(parameter.numel, galore.ELEMENTS)
    moments = 2 * FP32 * (2 if below_fp32 else 1)
    if not _is_projected(parameter, rank):
        return turn * moments
    projected = rank * max(parameter.shape)
    updated = projected * (parameter.itemsize + moments)
    moved = projected * (parameter.itemsize + FP32) + turn * (FP32 + below_fp32 * parameter.itemsize)
    nbytes = 4 * (rank + galore.OVERSAMPLING) * max(parameter.shape) * FP32 + below_fp32 * parameter.numel * FP32
    return max(updated, moved, nbytes)


def _muon_step(parameter: Parameter, rank: int) -> int:
    """torch.optim._muon: the update, two bf16 copies of it, and two m x m matrices in bf16."""
    if not parameter.by_muon:
        return 0
    return parameter.nbytes + 4 * parameter.numel + 4 * min(parameter.shape) ** 2


def _muon_moves(parameter: Parameter, rank: int) -> int:
    """The momentum and the update, then 5 iterations of three products in bf16, and the weight's decay and update."""
    if not parameter.by_muon:
        return 7 * parameter.nbytes
    short = min(parameter.shape)
    return 11 * parameter.nbytes + 5 * (8 * parameter.numel + 10 * short**2)


# The products of the iterations at 600 TFLOP/s of an H200's 132 multiprocessors, about the rate of large matrices in
# bf16. No GPU has measured it.
_MUON_FLOPS_SM_S = 600e12 / 132


def _muon_sm_s(parameter: Parameter) -> float:
    if not parameter.by_muon:
        return 0.0
    short = min(parameter.shape)
    return 5 * (4 * short * parameter.numel + 2 * short**3) / _MUON_FLOPS_SM_S


def _torchao_step(bits: int) -> Callable[[Parameter, int], int]:
    """The tensors that torch.compile keeps between its kernels for each of two moments: the scaled values in fp32.

    For 4 bits it also keeps the codes as 64-bit integers, because they are packed in pairs (torchao 0.18
    optim/quant_utils.py, code generated by torch 2.13).
    """

    def step(parameter: Parameter, rank: int) -> int:
        return parameter.numel * 2 * (FP32 + 8 * (bits == 4)) if _torchao_quantises(parameter) else 0

    return step


def _torchao_moves(bits: int) -> Callable[[Parameter, int], int]:
    """Weight and gradient, states, and the tensors between the kernels, which are written and read."""

    def moves(parameter: Parameter, rank: int) -> int:
        states = sum(tensor.nbytes for tensor in _torchao(bits)(parameter, rank))
        return 3 * parameter.nbytes + 2 * states + 2 * _torchao_step(bits)(parameter, rank)

    return moves


# The compiled kernels look each new state up in a table of 2**bits values by binary search: `bits` dependent reads, and
# two for the rounding. On an H200, steps took 9.4 ps (Qwen3-0.6B in 8 bits) and 7.7 ps (Llama-3.2-1B in 4 bits) per
# element and read longer than their bytes. The constant is for one of its 132 multiprocessors.
_TORCHAO_READ_SM_S = 8.5e-12 * 132


def _torchao_sm_s(bits: int) -> Callable[[Parameter], float]:
    return lambda parameter: _TORCHAO_READ_SM_S * (bits + 2) * parameter.numel * _torchao_quantises(parameter)


# torch.compile's wrapper around one parameter's update, with three tensors per state, takes 0.2 ms on the host. This is
# the time for launching so many ops.
_COMPILED_CALLS = 65
# bitsandbytes' host code for one parameter, until the GPU is done, takes 0.08 ms. This is the time that `paged-adamw`
# and `lion-8bit` of Llama-3.2-1B took on an H200 beyond their bytes and their arithmetic.
_BNB_CALLS = 25
# GaLore's own ops, the search for values that are not finite, and the wait for its result.
_LAYERWISE_CALLS = 27

# --- the table -------------------------------------------------------------------------------------------------------

_ADAMW_8BIT = OptimizerCost(
    states=_bnb(2, bits=8, paged=False), shared_bytes=2 * 256 * FP32, calls=_BNB_CALLS, waits=True, sm_s=_bnb_8bit_sm_s
)
_ADEMAMIX_8BIT = replace(_ADAMW_8BIT, states=_ademamix(bits=8, paged=False), sm_s=_ademamix_8bit_sm_s)
_GALORE = OptimizerCost(states=_galore, temporaries=_galore_step, moves=_galore_moves, calls=16)


def _compiled(bits: int) -> OptimizerCost:
    return OptimizerCost(
        states=_torchao(bits),
        temporaries=_torchao_step(bits),
        moves=_torchao_moves(bits),
        calls=_COMPILED_CALLS,
        sm_s=_torchao_sm_s(bits),
    )


COSTS: Mapping[str, OptimizerCost] = {
    "adamw": OptimizerCost(states=_moments(2, step_on_device=True)),
    "adamw-foreach": OptimizerCost(
        states=_moments(2), temporaries=_like_parameter, holds_all=True, moves=_foreach_moves
    ),
    "adamw-8bit": _ADAMW_8BIT,
    "paged-adamw": OptimizerCost(states=_bnb(2, bits=32, paged=True), calls=_BNB_CALLS, waits=True),
    "paged-adamw-8bit": replace(_ADAMW_8BIT, states=_bnb(2, bits=8, paged=True)),
    "lion-8bit": replace(
        _ADAMW_8BIT, states=_bnb(1, bits=8, paged=False), shared_bytes=256 * FP32, sm_s=_lion_8bit_sm_s
    ),
    "ademamix": OptimizerCost(states=_ademamix(bits=32, paged=False), calls=_BNB_CALLS, waits=True),
    "ademamix-8bit": _ADEMAMIX_8BIT,
    "paged-ademamix": OptimizerCost(states=_ademamix(bits=32, paged=True), calls=_BNB_CALLS, waits=True),
    "paged-ademamix-8bit": replace(_ADEMAMIX_8BIT, states=_ademamix(bits=8, paged=True)),
    # the denominators of all gradients
    "schedule-free": OptimizerCost(
        states=_moments(2), temporaries=_like_parameter, holds_all=True, moves=_schedule_free_moves
    ),
    "adamw-torchao-8bit": _compiled(8),
    "adamw-torchao-4bit": _compiled(4),
    "adafactor": OptimizerCost(
        states=_adafactor, temporaries=_adafactor_step, leaves=_fp32_copy, moves=_adafactor_moves, calls=27
    ),
    # weight decay is added to a copy of the gradients
    "sgd": OptimizerCost(states=_moments(0), temporaries=_like_parameter, holds_all=True, moves=_sgd_moves),
    "muon": OptimizerCost(states=_muon, temporaries=_muon_step, moves=_muon_moves, calls=24, sm_s=_muon_sm_s),
    "galore": _GALORE,
    "galore-layerwise": replace(_GALORE, moves=_layerwise_moves, calls=_LAYERWISE_CALLS, waits=True),
}
"""Value of `train.optimizer` -> its cost."""


def cost_of(settings: Settings) -> OptimizerCost:
    """The cost of the optimizer of a run."""
    return replace(COSTS[settings.train.optimizer], rank=settings.train.galore_rank)
