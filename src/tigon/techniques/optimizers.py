"""The optimizers a run can choose: one row each, with the exact bytes of state and of the step's own temporaries.

Sizes are functions of a parameter's shape and dtype, read from the source of the package named in the row (PyTorch 2.11
to 2.13, bitsandbytes 0.50.2, torchao 0.18, transformers 5.17) and checked against the optimizers themselves in
tests/techniques/test_optimizers.py. They are bytes of tensors: the CUDA allocator rounds each tensor up to 512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tigon.techniques.condition import Condition
from tigon.techniques.technique import Technique

BNB_MIN_8BIT = 4096  # elements below which bitsandbytes keeps fp32 states
BNB_MIN_PAGED = 100_000  # elements below which its paged optimizers allocate on the device after all
BLOCK = 256  # elements that share a scale: bitsandbytes, and torchao as Trainer constructs it
FP32 = 4


class Parameter(NamedTuple):
    """A trained parameter, as far as an optimizer's size depends on it."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element: 4 under `fp32`, `amp-bf16` and `amp-fp16`, 2 under `bf16`."""
    projected: bool = False
    """The weight of a linear layer other than the head: what GaLore projects."""
    embedding: bool = False
    """The weight of an embedding, tied to the head or not: Trainer tells bitsandbytes to keep its states in fp32."""

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
    """`device`: from PyTorch's allocator; `managed`: CUDA unified memory, which moves to the host under pressure and
    which PyTorch's statistics do not count."""


States = Callable[[Parameter, int], tuple[StateTensor, ...]]
"""(parameter, GaLore's rank) -> the tensors of its state; only GaLore looks at the rank."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A row of the table."""

    name: str
    help: str
    trainer_name: str | None
    """What transformers' TrainingArguments call it; None: tigon's own, given to the Trainer as a class."""
    package: str | None = None
    """The package it needs beyond PyTorch and transformers: a key of PACKAGE_EXTRAS."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    in_backward: bool = False
    """Updates each weight in the backward pass: no accumulation, no clipping."""
    needs_compiler: bool = False
    """Goes through torch.compile: on a CPU a C++ compiler has to be there."""
    states: States
    shared_bytes: int = 0
    """State that all parameters share, such as quantisation maps."""
    step_bytes: Callable[[Parameter, int], int] = lambda parameter, rank: 0
    """Temporaries of one parameter's update."""
    step_leaves: Callable[[Parameter, int], int] = lambda parameter, rank: 0
    """What of them is still held when the next parameter's are highest."""
    step_holds_all: bool = False
    """The temporaries of all parameters live at once (foreach); otherwise one parameter's at a time."""
    step_moves: Callable[[Parameter, int], int] | None = None
    """Bytes of device memory that one parameter's update reads and writes, counted over its operators; None: a single
    pass over weight, gradient and states."""
    step_calls: int = 0
    """Operators that the host launches for each parameter, if one by one."""
    step_waits: bool = False
    """The host waits for the GPU after each parameter, so that the time of both adds up."""
    step_sm_s: Callable[[Parameter], float] = lambda parameter: 0.0
    """Seconds that one multiprocessor computes for a parameter's update beyond what its bytes take."""
    precision: str
    """What it does to the result, against AdamW with fp32 states."""
    source: str

    def state_tensors(self, parameter: Parameter, *, rank: int = 0) -> tuple[StateTensor, ...]:
        """The state of one parameter, tensor by tensor."""
        return self.states(parameter, rank)

    def state_bytes(self, parameters: Iterable[Parameter], *, rank: int = 0, place: str = "device") -> int:
        """State of all `parameters` at `place`, shared tables included."""
        shared = self.shared_bytes if place == "device" else 0
        tensors = (tensor for parameter in parameters for tensor in self.states(parameter, rank))
        return shared + sum(tensor.nbytes for tensor in tensors if tensor.place == place)

    def step_peak_bytes(self, parameters: Iterable[Parameter], *, rank: int = 0) -> int:
        """The most that the step itself adds to weights, gradients and states."""
        parameters = list(parameters)
        each = [self.step_bytes(parameter, rank) for parameter in parameters]
        if self.step_holds_all:
            return sum(each)
        left = [0, *(self.step_leaves(parameter, rank) for parameter in parameters)]
        return max(map(sum, zip(each, left, strict=False)), default=0)


# --- the shapes of states --------------------------------------------------------------------------------------------


def _moments(count: int, *, itemsize: int | None = None, step_on_device: bool = False) -> States:
    """`count` tensors like the parameter, in its dtype or in `itemsize` bytes an element."""

    def states(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
        moment = StateTensor(parameter.numel * (itemsize or parameter.itemsize))
        return (moment,) * count + ((StateTensor(FP32),) if step_on_device else ())

    return states


def _bnb_quantises(parameter: Parameter) -> bool:
    return parameter.numel >= BNB_MIN_8BIT and not parameter.embedding


def _bnb(count: int, *, bits: int, paged: bool) -> States:
    """bitsandbytes: `count` moments in `bits`, with an fp32 absolute maximum for every 256 elements of 8-bit ones.

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
    """torchao: two moments, each with its own scales and its own quantisation map.

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
    """A row and a column of second moments for a matrix, a whole one for a vector; fp32 whatever the parameter's."""
    *rows, columns = parameter.shape or (1,)
    rms = StateTensor(FP32)
    if not rows:
        return StateTensor(FP32 * columns), rms
    return StateTensor(FP32 * math.prod(rows)), StateTensor(FP32 * math.prod((*rows[:-1], columns))), rms


def galore_projects(parameter: Parameter, rank: int) -> bool:
    """A projection that is no smaller than the matrix saves nothing."""
    return parameter.projected and len(parameter.shape) == 2 and min(parameter.shape) > rank


def _galore(parameter: Parameter, rank: int) -> tuple[StateTensor, ...]:
    """For (m, n): min(m, n) x r of projection, two moments of r x max(m, n), in its dtype (arXiv 2403.03507 §4.2)."""
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
    """The gradient's square and its sum with epsilon, in fp32; below fp32 copies of gradient and weight too.

    transformers==5.17 optimization.py, Adafactor.step: the update of the parameter before is bound until then.
    """
    return parameter.numel * FP32 * (2 if parameter.itemsize == FP32 else 4)


def _fp32_copy(parameter: Parameter, rank: int) -> int:
    return parameter.numel * FP32


def _foreach_moves(parameter: Parameter, rank: int) -> int:
    """torch.optim.adam: _multi_tensor_adam, an operator at a time: decay 2 reads and writes, lerp 3, mul 2, addcmul 3,
    sqrt 2, two divisions and sums of 2, addcdiv 4."""
    return 20 * parameter.nbytes


def _sgd_moves(parameter: Parameter, rank: int) -> int:
    """torch.optim.sgd: _multi_tensor_sgd: the decay's sum into a copy, and the update: 3 each."""
    return 6 * parameter.nbytes


def _adafactor_moves(parameter: Parameter, rank: int) -> int:
    """21 reads and writes in fp32; in 16 bits the casts of gradient and weight and the copy back besides."""
    return parameter.numel * (21 * FP32 if parameter.itemsize == FP32 else 26 * FP32)


def _galore_moves(parameter: Parameter, rank: int) -> int:
    """31 reads and writes of what Adam works on, in fp32; a projected weight's gradient and update are 9 more."""
    if not galore_projects(parameter, rank):
        return parameter.numel * 31 * FP32
    whole = 9 * FP32 if parameter.itemsize == FP32 else 30
    return parameter.numel * whole + rank * max(parameter.shape) * 31 * FP32


def _layerwise_moves(parameter: Parameter, rank: int) -> int:
    """And the look for what is not finite, a reading."""
    return _galore_moves(parameter, rank) + parameter.nbytes


# The blockwise 8-bit kernel looks each new state up in a table of 256 (bitsandbytes, csrc/kernels.cu): it computes
# longer than it waits for memory. Two steps measured on an H200, of 1.0 and 7.5 thousand million 8-bit elements, took
# 25 and 178 ms longer than their bytes; times its 132 multiprocessors.
_BNB_8BIT_SM_S = 24e-12 * 132


def _bnb_8bit_sm_s(parameter: Parameter) -> float:
    return parameter.numel * _BNB_8BIT_SM_S if _bnb_quantises(parameter) else 0.0


def _lion_8bit_sm_s(parameter: Parameter) -> float:
    return _bnb_8bit_sm_s(parameter) / 2  # one state instead of two


# techniques/galore.py: elements of a weight that are updated at a time; columns of the range finder beyond the rank,
# more of which change the basis below rounding (arXiv 0909.4061 §4.5).
GALORE_ELEMENTS, GALORE_OVERSAMPLING = 1 << 23, 8


def _galore_step(parameter: Parameter, rank: int) -> int:
    """Of the elements that are updated at a time both moments in fp32, below fp32 with copies of their old values. In a
    subspace the most of: these, beside the projected gradient; what moves the weight, beside gradient and update; an
    fp32 copy of the whole gradient where the subspace is chosen, with the range finder's products."""
    below_fp32 = parameter.itemsize < FP32
    turn = min(parameter.numel, GALORE_ELEMENTS)
    moments = 2 * FP32 * (2 if below_fp32 else 1)
    if not galore_projects(parameter, rank):
        return turn * moments
    projected = rank * max(parameter.shape)
    updated = projected * (parameter.itemsize + moments)
    moved = projected * (parameter.itemsize + FP32) + turn * (FP32 + below_fp32 * parameter.itemsize)
    found = 4 * (rank + GALORE_OVERSAMPLING) * max(parameter.shape) * FP32 + below_fp32 * parameter.numel * FP32
    return max(updated, moved, found)


def _torchao_step(bits: int) -> Callable[[Parameter, int], int]:
    """What torch.compile keeps between its kernels of each of two moments: its values in fp32, scaled, and in 4 bits,
    which are packed in pairs, the codes as 64-bit integers (torchao 0.18 optim/quant_utils.py, torch 2.13's code)."""

    def step(parameter: Parameter, rank: int) -> int:
        return parameter.numel * 2 * (FP32 + 8 * (bits == 4)) if _torchao_quantises(parameter) else 0

    return step


def _torchao_moves(bits: int) -> Callable[[Parameter, int], int]:
    """Weight and gradient, states, and what is kept between the kernels, written and read."""

    def moves(parameter: Parameter, rank: int) -> int:
        states = sum(tensor.nbytes for tensor in _torchao(bits)(parameter, rank))
        return 3 * parameter.nbytes + 2 * states + 2 * _torchao_step(bits)(parameter, rank)

    return moves


# Each new state is looked up in a table of 2**bits by halving: `bits` dependent reads, and two for the rounding, in
# kernels that torch.compile made. Two steps measured on an H200 took beyond their bytes 9.4 ps an element and read
# (Qwen3-0.6B in 8 bits) and 7.7 (Llama-3.2-1B in 4); times its 132 multiprocessors.
_TORCHAO_READ_SM_S = 8.5e-12 * 132


def _torchao_sm_s(bits: int) -> Callable[[Parameter], float]:
    return lambda parameter: _TORCHAO_READ_SM_S * (bits + 2) * parameter.numel * _torchao_quantises(parameter)


# torch.compile's wrapper around one parameter's update with its three-part states: 0.2 ms of the host, which is the
# time of so many operators.
_COMPILED_CALLS = 65
# bitsandbytes' own way around one parameter's kernel, until the GPU is done: what `paged-adamw` and `lion-8bit` of
# Llama-3.2-1B took on an H200 beyond their bytes (and half of `adamw-8bit`'s arithmetic), 0.08 ms.
_BNB_CALLS = 25
# GaLore's own operators, the look for what is not finite, and the wait for its answer.
_LAYERWISE_CALLS = 27

# --- the table -------------------------------------------------------------------------------------------------------

_ROWS = (
    Optimizer(
        name="adamw", help="AdamW, one fused pass over weights, gradients and moments.",
        trainer_name="adamw_torch_fused", states=_moments(2, step_on_device=True),
        precision="The reference. Under `bf16` the moments are bf16 too.",
        source="torch.optim.AdamW(fused=True); arXiv 1711.05101",
    ),
    Optimizer(
        name="adamw-foreach", help="AdamW by multi-tensor operations; on a GPU it holds one more copy of the weights.",
        trainer_name="adamw_torch", states=_moments(2), step_bytes=_like_parameter, step_holds_all=True,
        step_moves=_foreach_moves, precision="As `adamw`, to rounding.", source="torch.optim.AdamW: _multi_tensor_adam",
    ),
    Optimizer(
        name="adamw-8bit", help="AdamW with 8-bit blockwise moments.",
        trainer_name="adamw_bnb_8bit", package="bitsandbytes", states=_bnb(2, bits=8, paged=False),
        shared_bytes=2 * 256 * FP32, step_sm_s=_bnb_8bit_sm_s, step_calls=_BNB_CALLS, step_waits=True,
        precision="Moments quantised in blocks of 256; fp32 for embeddings and parameters below 4,096 elements.",
        source="bitsandbytes; arXiv 2110.02861",
    ),
    Optimizer(
        name="paged-adamw", help="AdamW with fp32 moments in unified memory, which moves to the host under pressure.",
        devices=("cuda",), trainer_name="paged_adamw_32bit", package="bitsandbytes",
        states=_bnb(2, bits=32, paged=True), step_calls=_BNB_CALLS, step_waits=True,
        precision="As `adamw` with fp32 moments.", source="bitsandbytes; arXiv 2305.14314 §3",
    ),
    Optimizer(
        name="paged-adamw-8bit", help="`adamw-8bit` with the moments in unified memory.",
        devices=("cuda",), trainer_name="paged_adamw_8bit", package="bitsandbytes", states=_bnb(2, bits=8, paged=True),
        shared_bytes=2 * 256 * FP32, step_sm_s=_bnb_8bit_sm_s, step_calls=_BNB_CALLS, step_waits=True,
        precision="As `adamw-8bit`.", source="bitsandbytes; arXiv 2110.02861, 2305.14314",
    ),
    Optimizer(
        name="lion-8bit", help="Lion: one 8-bit moment, and updates of one size; wants a tenth of AdamW's rate.",
        trainer_name="lion_8bit", package="bitsandbytes", states=_bnb(1, bits=8, paged=False), shared_bytes=256 * FP32,
        step_sm_s=_lion_8bit_sm_s, step_calls=_BNB_CALLS, step_waits=True,
        precision="Another optimizer: the sign of a moment, quantised in blocks of 256.",
        source="bitsandbytes; arXiv 2302.06675",
    ),
    Optimizer(
        name="adamw-torchao-8bit", help="AdamW with 8-bit blockwise moments, compiled by PyTorch.",
        trainer_name="adamw_torch_8bit", package="torchao", needs_compiler=True, states=_torchao(8),
        step_bytes=_torchao_step(8), step_moves=_torchao_moves(8), step_sm_s=_torchao_sm_s(8),
        step_calls=_COMPILED_CALLS,
        precision="As `adamw-8bit`; a parameter whose size is no multiple of 256 keeps moments of its own dtype.",
        source="torchao.optim.AdamW8bit; arXiv 2110.02861",
    ),
    Optimizer(
        name="adamw-torchao-4bit", help="AdamW with 4-bit blockwise moments, compiled by PyTorch.",
        trainer_name="adamw_torch_4bit", package="torchao", needs_compiler=True, states=_torchao(4),
        step_bytes=_torchao_step(4), step_moves=_torchao_moves(4), step_sm_s=_torchao_sm_s(4),
        step_calls=_COMPILED_CALLS,
        precision="Moments of 16 levels in blocks of 256.", source="torchao.optim.AdamW4bit; arXiv 2309.01507",
    ),
    Optimizer(
        name="adafactor", help="Adafactor with the recipe's learning rate: second moments as a row and a column.",
        trainer_name="adafactor", states=_adafactor, step_bytes=_adafactor_step, step_leaves=_fp32_copy,
        step_moves=_adafactor_moves, step_calls=27,
        precision="Another optimizer: no first moment, a rank-1 second one, updates clipped to unit RMS.",
        source="transformers.Adafactor; arXiv 1804.04235",
    ),
    Optimizer(
        name="sgd", help="Gradient descent without momentum: no state.", trainer_name="sgd", states=_moments(0),
        step_bytes=_like_parameter, step_holds_all=True,  # weight decay is added to a copy of the gradients
        step_moves=_sgd_moves,
        precision="Another optimizer; weight decay is an L2 term.", source="torch.optim.SGD",
    ),
    Optimizer(
        name="galore",
        help="AdamW in a subspace of each linear layer's gradient, chosen anew every `train.galore_gap` steps.",
        trainer_name=None, states=_galore, step_bytes=_galore_step, step_moves=_galore_moves, step_calls=16,
        precision="Updates of rank `train.galore_rank` in linear layers; AdamW elsewhere.",
        source="tigon.techniques.galore; arXiv 2403.03507",
    ),
    Optimizer(
        name="galore-layerwise", in_backward=True,
        help="`galore`, each weight updated in the backward pass and its gradient freed.",
        trainer_name=None, states=_galore, step_bytes=_galore_step, step_moves=_layerwise_moves,
        step_calls=_LAYERWISE_CALLS, step_waits=True,
        precision="As `galore`, without clipping of the gradient's norm.",
        source="tigon.techniques.galore; arXiv 2403.03507 §4.4",
    ),
)  # fmt: skip

OPTIMIZERS: Mapping[str, Optimizer] = {row.name: row for row in _ROWS}


def bytes_a_parameter(row: Optimizer) -> float:
    """State of one element of a large fp32 matrix, the place aside; for tables, not for plans."""
    matrix = Parameter((4096, 4096), FP32, projected=True)
    return sum(tensor.nbytes for tensor in row.states(matrix, 128)) / matrix.numel


def _technique(row: Optimizer) -> Technique:
    return Technique(
        name=row.name, page="optimizers",
        saves=f"{bytes_a_parameter(row):.3g} bytes of state a parameter instead of AdamW's 8.",
        costs=row.help, precision=row.precision, needs=(row.package,) if row.package else (), devices=row.devices,
        recipe={"train.optimizer": row.name} | ({"train.max_grad_norm": 0} if row.in_backward else {}),
        chosen=(Condition("optimizer", "is", row.name),),
        arguments=lambda choices, facts: {"optim": row.trainer_name} if row.trainer_name else {}, source=row.source,
    )  # fmt: skip


TECHNIQUES = tuple(_technique(row) for row in _ROWS)
