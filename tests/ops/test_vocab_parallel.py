"""Heads divided by vocabulary between two processes have the whole head's values and gradients, by `helpers`' rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peaked_logits import FACTOR, of_fp32_logits, peaked
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import two_ranks
from backends import HAS_GPU, kernels_on_the_cpu
from helpers import (
    Count,
    Inputs,
    Result,
    assert_result_within,
    make,
    relative_error,
    run,
    tensors_of,
    truth_and_baseline,
    upstream_for,
    with_leaves,
    worse_of,
)
from second_proofs import proved_by
from tests.ops.cases import cases_of
from tigon.errors import LabelError, OptionError, ShapeError, ShardingError
from tigon.ops import OPS, Op, VocabParallelOptions, linear_cross_entropy, linear_kl, linear_logprobs, logprobs
from tigon.ops.head.plan import LogitBytes, plan_whole_rows
from two_ranks import Scenarios

REFUSED = ("label_smoothing", "rank")
"""Options of the ops' cases that a divided head does not have."""
OF_HEADS = {"weight": "bias", "teacher_weight": "teacher_bias"}
"""The divided tensors of an op: each weight and its bias."""
ORDERS = 4
"""Orders of summation of the unfused op that a result is compared with. One alone is exact by luck on some CPUs."""


def cut(V: int, share: float) -> tuple[slice, slice]:
    """The two processes' rows of V, the first one's share of them."""
    at = round(V * share)
    return slice(0, at), slice(at, V)


def divided(op: Op, rank: int, mesh: Any, rows: Sequence[slice] | None, inputs: Inputs) -> Result:
    """The op's outputs and gradients of this process: of its rows, or of a DTensor's part for None."""
    names = [n for pair in OF_HEADS.items() for n in pair if isinstance(inputs.get(n), Tensor)]
    if rows is None:
        mine = inputs | {n: distribute_tensor(inputs[n], mesh, [Shard(0)]) for n in names}
        options = {}
    else:
        mine = inputs | {n: inputs[n][rows[rank]].clone() for n in names}
        options = {"vocab_parallel": VocabParallelOptions(rows[rank].start, rows[rank].stop)}
    leaves = {n: t.requires_grad_() if n in names else t for n, t in with_leaves(op, mine).items()}
    given = {n: replicated(t, mesh) if rows is None and n.endswith("hidden") else t for n, t in leaves.items()}
    outputs = tensors_of(op.call(**given, **options))
    wanted = [n for n in op.grads if isinstance(leaves.get(n), Tensor)]
    upstream = [g.to(t.dtype) for g, t in zip(upstream_for(outputs), outputs, strict=True)]
    grads = torch.autograd.grad(outputs, [leaves[n] for n in wanted], upstream)
    found = dict(zip(wanted, grads, strict=True))
    for name in names:
        if rows is None:
            assert isinstance(found[name], DTensor) and found[name].placements == (Shard(0),)
        found[name] = found[name].full_tensor() if rows is None else joined(found[name], rank, rows)
    return Result(outputs, found)


def replicated(t: Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(t, mesh, [Replicate()])


def joined(part: Tensor, rank: int, rows: Sequence[slice]) -> Tensor:
    """The whole of a tensor that is divided by rows."""
    V = rows[-1].stop
    whole = part.new_zeros(V, *part.shape[1:], dtype=torch.float64)
    whole[rows[rank]] = part.double()
    dist.all_reduce(whole)
    return whole.to(part.dtype)


class ProductsOfParts(TorchFunctionMode):
    """The unfused op of a divided head and chunks of one token: one product for each of both.

    A library may sum a small product in another order. On an AMD EPYC, the gradient of three tokens or fewer has up to
    five times the error of nine.
    """

    def __init__(self, rows: Sequence[slice]) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        parts = [(weight[r], None if bias is None else bias[r]) for r in self.rows]
        tokens = x.reshape(-1, 1, x.shape[-1]).unbind()
        logits = [torch.cat([F.linear(token, *part) for part in parts], -1) for token in tokens]
        return torch.cat(logits).view(*x.shape[:-1], -1)


def check(
    op: Op, case: Any, dtype: torch.dtype, rank: int, mesh: Any, rows: Sequence[slice] | None, factor: float = 2.0
) -> float:
    inputs = make(op, case, dtype)
    upstream = upstream_for(tensors_of(op.call(**inputs)))
    # The divided head adds in another order than the whole one, which is as exact as any other.
    truth, baseline = truth_and_baseline(op, inputs, upstream, max(case.product_orders, ORDERS))
    with ProductsOfParts(rows or cut(case.shape[-1], 0.5)):
        baseline = worse_of(baseline, run(op.oracle, op, with_leaves(op, inputs), upstream), truth)
    assert_result_within(divided(op, rank, mesh, rows, inputs), truth, baseline, factor)
    return 0.0


def whole_cases(name: str) -> list[Any]:
    return [case for case in cases_of(OPS[name]) if case.small and not set(REFUSED) & set(case.options)]


DIVISIONS: dict[str, float | None] = {"dtensor": None, "uneven": 0.37}


def every_case(name: str, division: str, dtype: torch.dtype) -> Callable[[int, Any], float]:
    """A scenario: all cases of an op."""

    def scenario(rank: int, mesh: Any) -> float:
        for case in whole_cases(name):
            share = DIVISIONS[division]
            rows = None if share is None else cut(case.shape[-1], share)
            try:
                check(OPS[name], case, dtype, rank, mesh, rows)
            except Exception as error:
                raise AssertionError(f"{name}, case {case.id}") from error
        return 0.0

    return scenario


def case_of(name: str, **changes: Any) -> Any:
    """The op's first case with other options."""
    case = OPS[name].case
    return dataclasses.replace(case, options={**case.options, **changes})


def kernels(rank: int, mesh: Any) -> float:
    """The kernels get other arguments for a part than for a whole head."""
    with kernels_on_the_cpu():
        for dtype, factor in ((torch.float32, 2.0), (torch.bfloat16, 4.0)):
            case = case_of("linear_logprobs", outputs=("lse", "entropy"), ids=3, chunk_bytes=42 * 40 * 4)
            check(OPS["linear_logprobs"], case, dtype, rank, mesh, cut(100, 0.37), factor)
            case = case_of("linear_cross_entropy", z_loss=1e-2, bias=True, chunk_bytes=100 * 4 * 11)
            check(OPS["linear_cross_entropy"], case, dtype, rank, mesh, cut(100, 0.37), factor)
            for changes in ({}, {"kind": "jsd", "beta": 0.3, "bias": True, "masked": 0.5}):
                case = case_of("linear_kl", **changes, chunk_bytes=42 * 40 * 4)
                check(OPS["linear_kl"], case, dtype, rank, mesh, cut(100, 0.37), factor)
    return 0.0


def one_process_has_all_labels(rank: int, mesh: Any) -> float:
    op, case = OPS["linear_cross_entropy"], case_of("linear_cross_entropy", z_loss=1e-2, bias=True)
    inputs = make(op, case, torch.float32)
    inputs["target"] = torch.where(inputs["target"] >= 0, inputs["target"] % 30, inputs["target"])
    upstream = upstream_for(tensors_of(op.call(**inputs)))
    truth, baseline = truth_and_baseline(op, inputs, upstream)
    for rows in (cut(100, 0.3), cut(100, 1.0)):  # the second process has no label, then no row at all
        for chunk_bytes in (1 << 20, 100 * 4 * 11):
            found = divided(op, rank, mesh, rows, inputs | {"chunk_bytes": chunk_bytes})
            assert_result_within(found, truth, baseline, 2.0)
    return 0.0


def divergence_with_one_process_alone(rank: int, mesh: Any) -> float:
    """The second process holds no row, and the chunks are its own only if the first one's size decides."""
    for changes in ({}, {"kind": "jsd"}):
        case = case_of("linear_kl", **changes, chunk_bytes=100 * 8 * 5, bias=True, teacher_bias=True)
        check(OPS["linear_kl"], case, torch.float32, rank, mesh, cut(100, 1.0))
    return 0.0


def peaked_logits(rank: int, mesh: Any) -> float:
    """The error is that of fp32 logits, in all chunks and kept."""
    for name in ("linear_cross_entropy", "linear_logprobs", "linear_kl"):
        for chunk_bytes in (1 << 20, 100 * 4 * 11):
            op, case = OPS[name], case_of(name, chunk_bytes=chunk_bytes)
            inputs = peaked(op, case, torch.bfloat16, torch.device("cpu"), 30.0)
            found = divided(op, rank, mesh, cut(100, 0.37), inputs)
            upstream = upstream_for(found.outputs)
            truth, _ = truth_and_baseline(op, inputs, upstream)
            assert_result_within(found, truth, of_fp32_logits(op, inputs, upstream), FACTOR)
    return 0.0


def outputs_of_the_loss(rank: int, mesh: Any) -> float:
    op, case = OPS["linear_cross_entropy"], case_of("linear_cross_entropy", bias=True)
    inputs = make(op, case, torch.float32)
    rows = cut(100, 0.37)[rank]
    mine = inputs | {"weight": inputs["weight"][rows], "bias": inputs["bias"][rows]}
    names = ("logprob", "entropy", "accuracy", "predicted")
    part = VocabParallelOptions(rows.start, rows.stop)
    got, want = linear_cross_entropy(**mine, outputs=names, vocab_parallel=part), op.call(**inputs, outputs=names)
    assert torch.equal(got.predicted, want.predicted) and torch.equal(got.accuracy, want.accuracy)
    assert not (got.logprob.requires_grad or got.entropy.requires_grad)
    return max(relative_error(getattr(got, n), getattr(want, n)) for n in ("loss", "logprob", "entropy"))


def largest_logits(rank: int, mesh: Any) -> float:
    """More of them than the second process has rows; -inf logits and ids equal to ignore_index among them."""
    V, J = 20, 12
    torch.manual_seed(3)
    hidden, weight, ids = torch.randn(30, 8), torch.randn(V, 8), torch.randint(V, (30,))
    bias = torch.where(torch.arange(V) % 3 == 0, -torch.inf, 0.0)
    rows = cut(V, 0.8)[rank]
    options = {"ignore_index": 7, "top_k": J, "outputs": ("predicted", "lse"), "logit_scale": -0.5}
    leaves = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
    part = VocabParallelOptions(rows.start, rows.stop)
    got = linear_logprobs(*leaves, ids, bias=-bias[rows], vocab_parallel=part, **options)
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    want = linear_logprobs(*exact, ids, bias=-bias.double(), **options)
    assert torch.equal(got.predicted, want.predicted) and torch.equal(got.topk_ids, want.topk_ids)
    assert torch.equal(got.topk_logprob.isinf(), want.topk_logprob.isinf())
    finite = want.topk_logprob.isfinite()
    errors = [relative_error(got.topk_logprob[finite], want.topk_logprob[finite])]
    grads = torch.autograd.grad(got.topk_logprob[finite].square().sum() + got.lse.sum(), leaves)
    exact_grads = torch.autograd.grad(want.topk_logprob[finite].square().sum() + want.lse.sum(), exact)
    errors += [relative_error(grads[0], exact_grads[0]), relative_error(grads[1], exact_grads[1][rows])]
    return max(errors)


def frozen_head_and_frozen_hidden(rank: int, mesh: Any) -> float:
    op, case = OPS["linear_cross_entropy"], OPS["linear_cross_entropy"].case
    inputs = make(op, case, torch.float32)
    rows = cut(100, 0.37)[rank]
    part = VocabParallelOptions(rows.start, rows.stop)
    errors = []
    for name in ("hidden", "weight"):
        whole = with_leaves(op, inputs, names=[name])
        op.call(**whole).backward()
        mine = inputs | {"weight": inputs["weight"][rows].clone()}
        mine[name] = mine[name].clone().requires_grad_()
        linear_cross_entropy(**mine, vocab_parallel=part).backward()
        want = whole[name].grad if name == "hidden" else whole[name].grad[rows]
        errors.append(relative_error(mine[name].grad, want))
    with torch.no_grad():
        mine = inputs | {"weight": inputs["weight"][rows]}
        errors.append(relative_error(linear_cross_entropy(**mine, vocab_parallel=part), op.call(**inputs)))
    return max(errors)


def hidden_gradient_that_other_code_adds_up(rank: int, mesh: Any) -> float:
    op = OPS["linear_cross_entropy"]
    inputs = make(op, op.case, torch.float32)
    whole = with_leaves(op, inputs, names=["hidden"])
    op.call(**whole).backward()
    rows, hidden = cut(100, 0.37)[rank], inputs["hidden"].clone().requires_grad_()
    part = VocabParallelOptions(rows.start, rows.stop, reduce_hidden_grad=False)
    linear_cross_entropy(
        **inputs | {"hidden": hidden, "weight": inputs["weight"][rows]}, vocab_parallel=part
    ).backward()
    dist.all_reduce(hidden.grad)
    return relative_error(hidden.grad, whole["hidden"].grad)


def second_backward(rank: int, mesh: Any) -> float:
    """Kept logits are not overwritten while the graph is kept."""
    inputs = make(OPS["linear_logprobs"], OPS["linear_logprobs"].case, torch.float32)
    rows = cut(100, 0.37)[rank]
    weight = inputs["weight"][rows].clone().requires_grad_()
    loss = linear_logprobs(
        inputs["hidden"], weight, inputs["ids"], vocab_parallel=VocabParallelOptions(rows.start, rows.stop)
    ).sum()
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    inputs = make(OPS["linear_cross_entropy"], OPS["linear_cross_entropy"].case, torch.float32)
    inputs |= {"weight": weight, "chunk_bytes": 63 * 4 * 11}
    loss = 3 * linear_cross_entropy(**inputs, vocab_parallel=VocabParallelOptions(rows.start, rows.stop))
    of_chunks = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2)]
    return max(relative_error(second, first), relative_error(*of_chunks))


def chunks_of_tokens_compute_each_product_once(rank: int, mesh: Any) -> float:
    """Two products in each of several chunks, one in each part of a chunk, and none in the backward."""
    inputs = make(OPS["linear_cross_entropy"], OPS["linear_cross_entropy"].case, torch.float32)
    rows = cut(100, 0.37)[rank]
    part = VocabParallelOptions(rows.start, rows.stop)
    inputs |= {"weight": inputs["weight"][rows].clone().requires_grad_(), "chunk_bytes": 63 * 4 * 11}
    inputs["hidden"].requires_grad_()
    with Count() as forward:
        loss = linear_cross_entropy(**inputs, vocab_parallel=part)
    with Count() as backward:
        loss.backward()
    size, tokens = LogitBytes(4, 4), int((inputs["target"] != -100).sum())
    plan = plan_whole_rows(inputs["target"].numel(), 63, size, inputs["chunk_bytes"])
    chunks = plan.token_slices(tokens)
    assert len(chunks) >= 3
    assert forward.n["tigon::linear_logprobs_fwd"] == sum(len(plan.logit_slices(rows)) for rows in chunks)
    assert forward.n["aten::mm"] + forward.n["aten::addmm"] == 2 * len(chunks), forward.n
    assert not any(n for name, n in backward.n.items() if name.endswith("mm") or "linear" in name), backward.n
    return 0.0


def nothing_counts(rank: int, mesh: Any) -> float:
    """All labels are ignored, or there is no token: no process waits for another."""
    rows = cut(10, 0.5)[rank]
    part = VocabParallelOptions(rows.start, rows.stop)
    for tokens in (4, 0):
        hidden, weight = torch.randn(tokens, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
        target = torch.full((tokens,), -100)
        loss = linear_cross_entropy(hidden, weight, target, outputs=("entropy", "predicted"), vocab_parallel=part)
        loss.loss.backward()
        assert float(loss.loss.detach()) == 0.0 and not hidden.grad.any() and not weight.grad.any()
    return 0.0


def refusals(rank: int, mesh: Any) -> float:
    """Both processes raise, so that neither waits."""
    rows = cut(10, 0.5)[rank]
    part = VocabParallelOptions(rows.start, rows.stop)
    hidden, weight, target = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 9, 10, 1])
    with pytest.raises(LabelError, match=r"10 .*no process"):
        linear_logprobs(hidden, weight, target, vocab_parallel=part)
    target[2] = 2
    for option in ({"label_smoothing": 0.1}, {"lora_a": torch.randn(2, 3), "lora_b": torch.randn(5, 2)}):
        with pytest.raises(ShardingError, match=next(iter(option))):
            linear_cross_entropy(hidden, weight, target, vocab_parallel=part, **option)
    with pytest.raises(ShapeError, match="this process's rows"):
        linear_logprobs(hidden, torch.randn(10, 3), target, vocab_parallel=part)
    with pytest.raises(ShapeError, match="class_weight"):
        linear_cross_entropy(hidden, weight, target, class_weight=torch.ones(4), vocab_parallel=part)
    whole = torch.randn(10, 4)
    with pytest.raises(ShardingError, match=r"Shard\(dim=1\).*one dimension"):
        linear_logprobs(torch.randn(4, 4), distribute_tensor(whole, mesh, [Shard(1)]), target)
    with pytest.raises(ShardingError, match=r"hidden .*Replicate"):
        hidden = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        linear_logprobs(hidden, distribute_tensor(whole, mesh, [Shard(0)]), target)
    with pytest.raises(ShardingError, match="bias is not divided"):
        x, divided_weight = replicated(torch.randn(4, 4), mesh), distribute_tensor(whole, mesh, [Shard(0)])
        linear_logprobs(x, divided_weight, target, bias=torch.randn(10))
    with pytest.raises(ShardingError, match=r"FSDP.*from_local"):
        linear_logprobs(torch.randn(4, 4), divided_weight, target)
    with pytest.raises(ShardingError, match="not divided alike"):
        x, teacher = torch.randn(4, 4), distribute_tensor(whole, mesh, [Shard(0)])
        linear_kl(x, whole, replicated(x, mesh), teacher)
    with pytest.raises(OptionError, match="vocab_parallel"):
        linear_logprobs(torch.randn(4, 3), weight, target, vocab_parallel=VocabParallelOptions(5, 0))
    with pytest.raises(LabelError, match="outside"):
        target[2] = 10
        linear_logprobs(replicated(torch.randn(4, 4), mesh), divided_weight, target)
    return 0.0


def compiled_around(rank: int, mesh: Any) -> float:
    """The op runs between two graphs."""
    rows = cut(10, 0.5)[rank]
    part = VocabParallelOptions(rows.start, rows.stop)
    torch.manual_seed(1)
    hidden, whole, target = torch.randn(8, 4), torch.randn(10, 4), torch.randint(10, (8,))

    def twice(weight: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(hidden, weight, target, vocab_parallel=part)

    weight = whole[rows].clone().requires_grad_()
    torch.compile(twice, backend="eager")(weight).backward()
    expected = whole.clone().requires_grad_()
    (2 * linear_cross_entropy(hidden, expected, target)).backward()
    return relative_error(weight.grad, expected.grad[rows])


def logits_that_exist(rank: int, mesh: Any) -> float:
    op, errors = OPS["logprobs"], []
    for case in (*(case for case in cases_of(op) if case.small), case_of("logprobs", top_k=50, outputs=("predicted",))):
        # Equal bf16 logits have no order, so two sides may take different ones for the largest.
        for dtype in (torch.float32,) if "top_k" in case.options else (torch.float32, torch.bfloat16):
            inputs, at = make(op, case, dtype), cut(case.shape[-1], 0.37)
            upstream = upstream_for(tensors_of(op.call(**inputs)))
            truth, baseline = truth_and_baseline(op, inputs, upstream)
            part = VocabParallelOptions(at[rank].start, at[rank].stop)
            logits = inputs["logits"][..., at[rank]].clone().requires_grad_()
            found = logprobs(**inputs | {"logits": logits}, vocab_parallel=part)
            outputs = tensors_of(found)
            grads = torch.autograd.grad(
                outputs, logits, [g.to(t.dtype) for g, t in zip(upstream, outputs, strict=True)]
            )
            columns = joined(grads[0].movedim(-1, 0).contiguous(), rank, at).movedim(0, -1)
            assert_result_within(Result(outputs, {"logits": columns}), truth, baseline, 2.0)
            if case.options.get("top_k"):
                errors.append(float((found.predicted != op.call(**inputs).predicted).sum()))
    return max(errors)


def parts_of_a_vocabulary(rank: int, mesh: Any) -> float:
    part = VocabParallelOptions.for_vocab(7)
    assert (part.start, part.stop) == ((0, 4) if rank == 0 else (4, 7))
    return 0.0


SCENARIOS: Scenarios = {
    **{
        f"{name}-{division}-{str(dtype).removeprefix('torch.')}": every_case(name, division, dtype)
        for name in ("linear_cross_entropy", "linear_logprobs", "linear_kl")
        for division, dtype in (("dtensor", torch.float32), ("uneven", torch.float32), ("uneven", torch.bfloat16))
    },
    "linear_cross_entropy-uneven-float16": every_case("linear_cross_entropy", "uneven", torch.float16),
    "linear_logprobs-uneven-float16": every_case("linear_logprobs", "uneven", torch.float16),
    "linear_kl-uneven-float16": every_case("linear_kl", "uneven", torch.float16),
    **{
        f.__name__: f
        for f in (
            kernels, one_process_has_all_labels, divergence_with_one_process_alone, outputs_of_the_loss,
            peaked_logits, largest_logits, frozen_head_and_frozen_hidden, hidden_gradient_that_other_code_adds_up,
            second_backward, chunks_of_tokens_compute_each_product_once, nothing_counts, refusals,
            compiled_around, logits_that_exist, parts_of_a_vocabulary,
        )
    },
}  # fmt: skip


WITHOUT_A_GPU = {
    "kernels": "on a machine with a GPU the kernels are not made for the interpreter",
    "compiled_around": "torch.compile asks the GPU for its random state, which a forked process cannot",
}
"""Scenarios whose two processes have to be on a machine without a GPU, and why."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The results of the scenarios that this session tests."""
    chosen = {item.name.partition("[")[2].removesuffix("]") for item in request.session.items}
    if HAS_GPU:
        chosen -= WITHOUT_A_GPU.keys()
    return two_ranks.run({name: s for name, s in SCENARIOS.items() if name in chosen}, tmp_path_factory.mktemp("ranks"))


def proves_first(scenario: str) -> bool:
    return not scenario.endswith("float16") or scenario.endswith("bfloat16")


@pytest.mark.parametrize(
    "scenario", proved_by(proves_first, SCENARIOS, "bf16 takes the same way, and rounds to fewer bits than fp16")
)
def test_divided_head_equals_the_whole_one(found: list[dict[str, Any]], scenario: str) -> None:
    if HAS_GPU and scenario in WITHOUT_A_GPU:
        pytest.skip(WITHOUT_A_GPU[scenario])
    two_ranks.assert_right(found, scenario)


def test_vocab_parallel_without_a_process_group_is_refused() -> None:
    with pytest.raises(ShardingError, match="init_process_group"):
        linear_logprobs(
            torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4).long(), vocab_parallel=VocabParallelOptions(0, 5)
        )
