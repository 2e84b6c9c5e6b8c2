"""rope: the conventions of the model families, layouts without copies, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import relative_error, run, with_leaves
from tigon.errors import DtypeError, OptionError, ShapeError
from tigon.ops import OPS, rope


def _inputs(T: int = 6, D: int = 16, R: int = 16, device: Any = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(0)
    angle = torch.arange(T)[None, :, None] * 100.0 ** (-torch.arange(0, R, 2) / R)
    table = torch.cat((angle, angle), -1)
    q, k = torch.randn(2, T, 4, D).transpose(1, 2), torch.randn(2, T, 2, D).transpose(1, 2)
    return {name: t.to(device) for name, t in {"q": q, "k": k, "cos": table.cos(), "sin": table.sin()}.items()}


# family, interleaved, R of D = 16 that its apply function takes, what it expects of a half-split table
FAMILIES = [
    ("llama", False, 16, lambda table: table),
    ("gpt_neox", False, 8, lambda table: table),
    ("cohere", True, 16, lambda table: table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)),
    ("glm", True, 8, lambda table: table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)),
    ("glm4", True, 8, lambda table: table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)),
]


@pytest.mark.parametrize(("family", "interleaved", "R", "ours"), FAMILIES, ids=[row[0] for row in FAMILIES])
def test_rotation_equals_the_familys_own(family: str, interleaved: bool, R: int, ours: Any, backend: Any) -> None:
    """The result equals transformers' own function, forward and backward.

    GLM rearranges its table inside its function; tigon does it before the call.
    """
    pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    inputs = _inputs(R=R, device=backend.device)
    theirs = dict(inputs)
    if family == "cohere":
        theirs |= {name: ours(inputs[name]) for name in ("cos", "sin")}
    op = OPS["rope"]
    expected = run(module.apply_rotary_pos_emb, op, with_leaves(op, theirs))
    mine = inputs | {name: ours(inputs[name]) for name in ("cos", "sin")}
    got = run(lambda **t: rope(**t, interleaved=interleaved), op, with_leaves(op, mine))
    for name, t in got.named().items():
        assert relative_error(t, expected.named()[name]) <= 2 * torch.finfo(torch.float32).eps, name


def test_rotation_keeps_lengths_and_depends_on_distance_alone(backend: Any) -> None:
    """A rotation keeps lengths and depends on the distance of two positions alone."""
    inputs = _inputs(T=12, device=backend.device)
    row = torch.randn(16, device=backend.device)
    q, k = rope(row.expand(1, 1, 12, 16), row.expand(1, 1, 12, 16), inputs["cos"], inputs["sin"])
    lengths = q.norm(dim=-1)
    torch.testing.assert_close(lengths, row.norm().expand_as(lengths))
    scores = (q @ k.transpose(-1, -2))[0, 0]
    for distance in range(12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def _bthd(heads: int) -> Tensor:
    return torch.randn(2, 6, heads, 16).transpose(1, 2)


def _packed_qkv(heads: int) -> Tensor:
    return torch.randn(2, 6, 3 * heads * 16)[..., heads * 16 : 2 * heads * 16].view(2, 6, heads, 16).transpose(1, 2)


LAYOUTS = {
    # what makes (B, heads, T, D), and the order of its dimensions in memory
    "bthd": (_bthd, (0, 2, 1, 3)),
    "bhtd": (lambda heads: torch.randn(2, heads, 6, 16), (0, 1, 2, 3)),
    "tbhd": (lambda heads: torch.randn(6, 2, heads, 16).permute(1, 2, 0, 3), (2, 0, 1, 3)),
    "packed-qkv": (_packed_qkv, (0, 2, 1, 3)),
}


@pytest.mark.parametrize("k_layout", LAYOUTS)
@pytest.mark.parametrize("q_layout", LAYOUTS)
def test_outputs_and_gradients_keep_the_memory_order_of_their_inputs(
    q_layout: str, k_layout: str, backend: Any
) -> None:
    """An attention behind, and the projection's backward before, would have to copy."""
    (build_q, q_order), (build_k, k_order) = LAYOUTS[q_layout], LAYOUTS[k_layout]
    tables = _inputs(device=backend.device)
    q, k = (build(heads).to(backend.device).requires_grad_() for build, heads in ((build_q, 4), (build_k, 2)))
    outputs = rope(q, k, tables["cos"], tables["sin"])
    # An upstream gradient in the other layout must not decide the gradient's.
    grads = torch.autograd.grad(outputs, (q, k), [torch.randn(t.shape, device=t.device) for t in outputs])
    for t, order in zip((*outputs, *grads), (q_order, k_order) * 2, strict=True):
        assert t.permute(order).is_contiguous(), t.stride()


def test_strided_input_is_read_without_a_copy(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts, and a slice of a packed projection, are read where they are."""
    if backend.name == "reference":
        pytest.skip("the reference's intermediate tensors are copies")
    copies = []
    contiguous = Tensor.contiguous
    monkeypatch.setattr(Tensor, "contiguous", lambda t, *a, **k: copies.append(t.shape) or contiguous(t, *a, **k))
    tables = _inputs(device=backend.device)
    for build, _ in LAYOUTS.values():
        rope(build(4).to(backend.device), build(2).to(backend.device), tables["cos"], tables["sin"])
    assert not copies
    rope(tables["q"].transpose(2, 3).contiguous().transpose(2, 3), tables["k"], tables["cos"], tables["sin"])
    assert copies[-1] == tables["q"].shape, "this test cannot see a copy"


def test_columns_beyond_the_rotary_width_pass_through_bit_for_bit(backend: Any) -> None:
    """They pass through bit for bit, NaN and infinities included."""
    inputs = _inputs(D=16, R=6, device=backend.device)
    inputs["q"][..., 6:] = torch.tensor([float("nan"), float("inf")], device=backend.device).repeat(5)
    q, _ = rope(**inputs)
    torch.testing.assert_close(q[..., 6:], inputs["q"][..., 6:], rtol=0, atol=0, equal_nan=True)
    assert q[..., :6].isfinite().all()


def test_gradient_of_one_output_alone_is_right(backend: Any) -> None:
    """Only q rotated for a loss, or only k wanting a gradient, in every combination."""
    inputs = _inputs(device=backend.device)
    op = OPS["rope"]
    full = run(op.call, op, with_leaves(op, inputs))
    for used in (0, 1):
        leaves = with_leaves(op, inputs)
        rope(**leaves)[used].sum().backward()
        name, other = ("q", "k") if used == 0 else ("k", "q")
        assert leaves[other].grad is None or not leaves[other].grad.any()
        ones = run(op.call, op, with_leaves(op, inputs), [torch.ones_like(t) for t in full.outputs])
        assert torch.equal(leaves[name].grad, ones.grads[name])


REFUSED = {
    "odd rotary width": (lambda i: i | {n: i[n][..., :5] for n in ("cos", "sin")}, ShapeError, "even"),
    "table wider than the head": (lambda i: i | {"q": i["q"][..., :8], "k": i["k"][..., :8]}, ShapeError, "2..8"),
    "table of another length": (lambda i: i | {n: i[n][:, :-1] for n in ("cos", "sin")}, ShapeError, "6 tokens"),
    "table of another batch": (lambda i: i | {n: i[n].expand(3, 6, 16) for n in ("cos", "sin")}, ShapeError, "batch 2"),
    "cos unlike sin": (lambda i: i | {"cos": i["cos"][..., :8]}, ShapeError, "both must be"),
    "4-D table": (lambda i: i | {n: i[n][None] for n in ("cos", "sin")}, ShapeError, "both must be"),
    "3-D q": (lambda i: i | {"q": i["q"][0]}, ShapeError, "4 dimensions"),
    "k of another length": (lambda i: i | {"k": i["k"][:, :, :-1]}, ShapeError, "heads"),
    "heads where tokens should be": (lambda i: i | {"unsqueeze_dim": 2}, ShapeError, "heads"),
    "unknown dimension": (lambda i: i | {"unsqueeze_dim": 3}, OptionError, "unsqueeze_dim=3"),
    "q and k of two dtypes": (lambda i: i | {"q": i["q"].half()}, DtypeError, "Cast one"),
    "table that learns": (lambda i: i | {"cos": i["cos"].clone().requires_grad_()}, OptionError, "detached"),
    "table on another device": (lambda i: i | {n: i[n].to("meta") for n in ("cos", "sin")}, ShapeError, "one device"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_mismatched_tables_are_refused(what: str) -> None:
    """A table that does not fit reads past its end; the message names what was passed."""
    change, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        rope(**change(_inputs()))


def test_table_that_requires_gradients_is_accepted_under_no_grad() -> None:
    inputs = _inputs()
    with torch.no_grad():
        rope(inputs["q"], inputs["k"], inputs["cos"].clone().requires_grad_(), inputs["sin"])
