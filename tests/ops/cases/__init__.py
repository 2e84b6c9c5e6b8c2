"""The cases of each op: shapes and options, which `Op.make` turns into tensors.

The first case of an op is the small one of its record, with which `tigon doctor` tests it.
"""

from __future__ import annotations

from tests.ops.cases import attention, convolution, delta_rule, experts, glu, heads, linear, losses, norms, rope
from tigon.ops import Case, Op

_GROUPS = (norms, rope, glu, losses, heads, linear, experts, attention, convolution, delta_rule)
CASES = {name: cases for group in _GROUPS for name, cases in group.CASES.items()}


def cases_of(op: Op) -> tuple[Case, ...]:
    """All cases of an op, the record's first."""
    return op.case, *(case for case in CASES.get(op.name, ()) if case.id != op.case.id)
