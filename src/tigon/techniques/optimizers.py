"""The optimizers that a run can choose: one row each, with the exact bytes of its state and of its temporaries.

Sizes are functions of a parameter's shape and dtype, read from the source of the package named in the row (PyTorch 2.11
to 2.13, bitsandbytes 0.50.2, torchao 0.18, transformers 5.17). tests/techniques/test_optimizers.py checks them against
the optimizers. They are bytes of tensors; the CUDA allocator rounds each tensor up to a multiple of 512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tigon.techniques.records.condition import Condition

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


States = Callable[[Parameter, int], tuple[StateTensor, ...]]
"""(parameter, GaLore's rank) -> the tensors of its state. Only GaLore uses the rank."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A row of the table."""

    name: str
    help: str
    trainer_name: str | None
    """Its name in transformers' TrainingArguments; None: tigon's own, given to the Trainer as a class."""
    package: str | None = None
    """The package it needs beyond PyTorch and transformers: a key of PACKAGE_EXTRAS."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    in_backward: bool = False
    """It updates each weight in the backward pass, so it can neither accumulate nor clip."""
    needs_compiler: bool = False
    """It uses torch.compile, which needs a C++ compiler on a CPU."""
    states: States
    shared_bytes: int = 0
    """Bytes of state that exist once for all parameters, such as quantisation maps."""
    step_bytes: Callable[[Parameter, int], int] = lambda parameter, rank: 0
    """(parameter, rank) -> bytes of temporaries in one parameter's update."""
    step_leaves: Callable[[Parameter, int], int] = lambda parameter, rank: 0
    """(parameter, rank) -> bytes of these temporaries that still live during the next parameter's update."""
    step_holds_all: bool = False
    """Whether the temporaries of all parameters live at the same time, as with foreach; otherwise those of one."""
    step_moves: Callable[[Parameter, int], int] | None = None
    """(parameter, rank) -> bytes of device memory that one parameter's update reads and writes, summed over its ops;
    None: a single pass over weight, gradient and states."""
    step_calls: int = 0
    """Ops that the host launches per parameter, if it updates parameters one by one."""
    step_waits: bool = False
    """The host waits for the GPU after each parameter, so the times of both add up."""
    step_sm_s: Callable[[Parameter], float] = lambda parameter: 0.0
    """Seconds that one multiprocessor computes for a parameter's update, beyond the time for its bytes."""
    effect_on_result: str
    """How it changes the numbers that the run computes, compared with AdamW with fp32 states."""
    source: str
    searched: bool = False
    """Whether the planner may choose it if the user names no optimizer. Rows that change the result less come first."""
    change_rank: int = 0
    last_resort: bool = False
    searched_with: tuple[Condition, ...] = ()
    """As in Technique."""

    @property
    def has_plain_states(self) -> bool:
        """Whether its states are plain tensors that belong to one parameter each: PyTorch's and transformers' own."""
        return self.package is None and self.trainer_name is not None

    def state_tensors(self, parameter: Parameter, *, rank: int = 0) -> tuple[StateTensor, ...]:
        """Returns the state of one parameter, tensor by tensor."""
        return self.states(parameter, rank)

    def state_bytes(self, parameters: Iterable[Parameter], *, rank: int = 0, place: str = "device") -> int:
        """Returns the bytes of state of all `parameters` at `place`, including shared tables."""
        shared = self.shared_bytes if place == "device" else 0
        tensors = (tensor for parameter in parameters for tensor in self.states(parameter, rank))
        return shared + sum(tensor.nbytes for tensor in tensors if tensor.place == place)

    def step_peak_bytes(self, parameters: Iterable[Parameter], *, rank: int = 0) -> int:
        """Returns the most bytes that the step adds to weights, gradients and states."""
        parameters = list(parameters)
        each = [self.step_bytes(parameter, rank) for parameter in parameters]
        if self.step_holds_all:
            return sum(each)
        left = [0, *(self.step_leaves(parameter, rank) for parameter in parameters)]
        return max(map(sum, zip(each, left, strict=False)), default=0)


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


def galore_projects(parameter: Parameter, rank: int) -> bool:
    """Returns whether GaLore projects a parameter. A projection as large as the matrix would save nothing."""
    return parameter.projected and len(parameter.shape) == 2 and min(parameter.shape) > rank


def _galore(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
    """For (m, n) in its dtype: a min(m, n) x r projection and two r x max(m, n) moments (arXiv 2403.03507 §4.2)."""
    if not galore_projects(parameter, rank):
        return (StateTensor(parameter.nbytes),) * 2
    short, long = sorted(parameter.shape)
    return (
        StateTensor(short * rank * parameter.itemsize),
        *(StateTensor(long * rank * parameter.itemsize),) * 2,
    )


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


def _sgd_moves(parameter: Parameter, rank: int) -> int:
    """torch.optim.sgd: _multi_tensor_sgd. Weight decay, added into a copy, and the update: 3 each."""
    return 6 * parameter.nbytes


def _adafactor_moves(parameter: Parameter, rank: int) -> int:
    """21 reads and writes in fp32. In 16 bits, casts of gradient and weight and the copy back are added."""
    return parameter.numel * (21 * FP32 if parameter.itemsize == FP32 else 26 * FP32)


def _galore_moves(parameter: Parameter, rank: int) -> int:
    """31 reads and writes of Adam's tensors in fp32. A projected weight's gradient and update add 9."""
    if not galore_projects(parameter, rank):
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


def _lion_8bit_sm_s(parameter: Parameter) -> float:
    return _bnb_8bit_sm_s(parameter) / 2  # one state instead of two


# Used by techniques/mechanisms/galore.py: elements of a weight that are updated at a time, and columns of the range
# finder beyond the rank. More columns would change the basis by less than rounding (arXiv 0909.4061 §4.5).
GALORE_ELEMENTS, GALORE_OVERSAMPLING = 1 << 23, 8


def _galore_step(parameter: Parameter, rank: int) -> int:
    """Both moments in fp32 of the elements that are updated at a time, below fp32 with copies of their old values.

    In a subspace, the largest of three: the moments and the projected gradient; the weight's change, the gradient and
    the update; and, when the subspace is chosen, an fp32 copy of the whole gradient with the range finder's products.
    """
    below_fp32 = parameter.itemsize < FP32
    turn = min(parameter.numel, GALORE_ELEMENTS)
    moments = 2 * FP32 * (2 if below_fp32 else 1)
    if not galore_projects(parameter, rank):
        return turn * moments
    projected = rank * max(parameter.shape)
    updated = projected * (parameter.itemsize + moments)
    moved = projected * (parameter.itemsize + FP32) + turn * (FP32 + below_fp32 * parameter.itemsize)
    nbytes = 4 * (rank + GALORE_OVERSAMPLING) * max(parameter.shape) * FP32 + below_fp32 * parameter.numel * FP32
    return max(updated, moved, nbytes)


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

_ROWS = (
    Optimizer(
        name="adamw", help="AdamW, one fused pass over weights, gradients and moments.",
        trainer_name="adamw_torch_fused", states=_moments(2, step_on_device=True), searched=True,
        effect_on_result="None: the other optimizers are compared with this one. Under `bf16` the moments are bf16 "
        "too.",
        source="torch.optim.AdamW(fused=True); arXiv 1711.05101",
    ),
    Optimizer(
        name="adamw-foreach", help="AdamW by multi-tensor ops; on a GPU it holds one more copy of the weights.",
        trainer_name="adamw_torch", states=_moments(2), step_bytes=_like_parameter, step_holds_all=True,
        step_moves=_foreach_moves, effect_on_result="None: the same numbers as `adamw`, except for rounding.",
        source="torch.optim.AdamW: _multi_tensor_adam",
    ),
    Optimizer(
        name="adamw-8bit", help="AdamW with 8-bit blockwise moments.", searched=True, change_rank=1,
        trainer_name="adamw_bnb_8bit", package="bitsandbytes", states=_bnb(2, bits=8, paged=False),
        shared_bytes=2 * 256 * FP32, step_sm_s=_bnb_8bit_sm_s, step_calls=_BNB_CALLS, step_waits=True,
        effect_on_result="Moments are rounded to 8 bits in blocks of 256. Those of embeddings and of parameters "
        "below 4,096 "
        "elements are fp32.",
        source="bitsandbytes; arXiv 2110.02861",
    ),
    Optimizer(
        name="paged-adamw", help="AdamW with fp32 moments in unified memory, which moves to the host under pressure.",
        devices=("cuda",), trainer_name="paged_adamw_32bit", package="bitsandbytes",
        states=_bnb(2, bits=32, paged=True), step_calls=_BNB_CALLS, step_waits=True,
        effect_on_result="None: the same numbers as `adamw` with fp32 moments, except for rounding.",
        source="bitsandbytes; arXiv 2305.14314 §3",
    ),
    Optimizer(
        name="paged-adamw-8bit", help="`adamw-8bit` with the moments in unified memory.", change_rank=1,
        devices=("cuda",), trainer_name="paged_adamw_8bit", package="bitsandbytes", states=_bnb(2, bits=8, paged=True),
        shared_bytes=2 * 256 * FP32, step_sm_s=_bnb_8bit_sm_s, step_calls=_BNB_CALLS, step_waits=True,
        effect_on_result="As `adamw-8bit`.", source="bitsandbytes; arXiv 2110.02861, 2305.14314",
    ),
    Optimizer(
        name="lion-8bit", help="Lion: one 8-bit moment, and updates of one size; needs a tenth of AdamW's rate.",
        change_rank=4,
        trainer_name="lion_8bit", package="bitsandbytes", states=_bnb(1, bits=8, paged=False), shared_bytes=256 * FP32,
        step_sm_s=_lion_8bit_sm_s, step_calls=_BNB_CALLS, step_waits=True,
        effect_on_result="Another algorithm: updates are the sign of a moment, which is rounded to 8 bits in blocks "
        "of 256.",
        source="bitsandbytes; arXiv 2302.06675",
    ),
    Optimizer(
        name="adamw-torchao-8bit", help="AdamW with 8-bit blockwise moments, compiled by PyTorch.",
        # elsewhere `adamw-8bit` has the same bytes without a compiler
        searched=True, searched_with=(Condition("sharding.fsdp", "is", True),), change_rank=1,
        trainer_name="adamw_torch_8bit", package="torchao", needs_compiler=True, states=_torchao(8),
        step_bytes=_torchao_step(8), step_moves=_torchao_moves(8), step_sm_s=_torchao_sm_s(8),
        step_calls=_COMPILED_CALLS,
        effect_on_result="As `adamw-8bit`. If a parameter's size is not divisible by 256, its moments keep its dtype.",
        source="torchao.optim.AdamW8bit; arXiv 2110.02861",
    ),
    Optimizer(
        name="adamw-torchao-4bit", help="AdamW with 4-bit blockwise moments, compiled by PyTorch.",
        searched=True, last_resort=True, change_rank=2,
        trainer_name="adamw_torch_4bit", package="torchao", needs_compiler=True, states=_torchao(4),
        step_bytes=_torchao_step(4), step_moves=_torchao_moves(4), step_sm_s=_torchao_sm_s(4),
        step_calls=_COMPILED_CALLS,
        effect_on_result="Moments are rounded to 16 levels in blocks of 256.",
        source="torchao.optim.AdamW4bit; arXiv 2309.01507",
    ),
    Optimizer(
        name="adafactor", help="Adafactor with the recipe's learning rate: second moments as a row and a column.",
        searched=True, last_resort=True, change_rank=4,
        trainer_name="adafactor", states=_adafactor, step_bytes=_adafactor_step, step_leaves=_fp32_copy,
        step_moves=_adafactor_moves, step_calls=27,
        effect_on_result="Another algorithm: no first moment, a second moment of rank 1, updates clipped to an RMS "
        "of 1.",
        source="transformers.Adafactor; arXiv 1804.04235",
    ),
    Optimizer(
        name="sgd", help="Gradient descent without momentum: no state.", trainer_name="sgd", states=_moments(0),
        change_rank=5,
        step_bytes=_like_parameter, step_holds_all=True,  # weight decay is added to a copy of the gradients
        step_moves=_sgd_moves,
        effect_on_result="Another algorithm: no moments, and weight decay is an L2 term.", source="torch.optim.SGD",
    ),
    Optimizer(
        name="galore", searched=True, last_resort=True, change_rank=4,
        help="AdamW in a subspace of each linear layer's gradient, chosen anew every `train.galore_gap` steps.",
        trainer_name=None, states=_galore, step_bytes=_galore_step, step_moves=_galore_moves, step_calls=16,
        effect_on_result="Another algorithm: updates of linear layers have rank `train.galore_rank`. Other "
        "weights are trained by AdamW.",
        source="tigon.techniques.mechanisms.galore; arXiv 2403.03507",
    ),
    Optimizer(
        name="galore-layerwise", in_backward=True, searched=True, last_resort=True, change_rank=5,
        help="`galore` that updates each weight in the backward pass and frees its gradient.",
        trainer_name=None, states=_galore, step_bytes=_galore_step, step_moves=_layerwise_moves,
        step_calls=_LAYERWISE_CALLS, step_waits=True,
        effect_on_result="As `galore`, and the gradient's norm is not clipped.",
        source="tigon.techniques.mechanisms.galore; arXiv 2403.03507 §4.4",
    ),
)  # fmt: skip

OPTIMIZERS: Mapping[str, Optimizer] = {row.name: row for row in _ROWS}


def bytes_per_parameter(row: Optimizer) -> float:
    """Returns the bytes of state per element of a large fp32 matrix, at all places; for tables, not for plans."""
    matrix = Parameter((4096, 4096), FP32, projected=True)
    return sum(tensor.nbytes for tensor in row.states(matrix, 128)) / matrix.numel
