"""When two rows trained the same: their losses, how far these fall, and what they trained.

Equal losses alone prove little: a run that learns at half the rate keeps its first losses within 0.01. So the losses
have to fall alike too. bf16 rounds differently in each library's kernels, and 11 steps amplify it with the fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOSS = 1e-2
"""How much a loss may differ, in nats ..."""
LOSS_PER_FALL = 2e-2
"""... plus this share of how far the losses of the other row have fallen by then."""
FALL = 0.1
"""How much the whole fall may differ, as a share of the other row's."""

Measured = Mapping[str, Any]


def disagreements(row: Measured, reference: Measured) -> list[str]:
    """Why `row` did not train what `reference` trained; empty if it did."""
    found = []
    ours, theirs = row["losses"], reference["losses"]
    if len(ours) != len(theirs):
        return [f"{len(ours)} losses instead of {len(theirs)}"]
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        if not abs(a - b) <= LOSS + LOSS_PER_FALL * abs(theirs[0] - b):  # also if one is NaN
            found.append(f"the loss of step {step} is {a:.4f} instead of {b:.4f}")
            break
    fall, expected = ours[0] - ours[-1], theirs[0] - theirs[-1]
    if not abs(fall - expected) <= FALL * abs(expected):
        found.append(f"the loss falls by {fall:.4f} instead of {expected:.4f}")
    if row["trained_parameters"] != reference["trained_parameters"]:
        found.append(f"trained weights: {row['trained_parameters']} instead of {reference['trained_parameters']}")
    if row["trained_dtypes"] != reference["trained_dtypes"] and not wider(row, reference):
        found.append(f"dtypes of trained weights: {row['trained_dtypes']} instead of {reference['trained_dtypes']}")
    return found


def wider(row: Measured, reference: Measured) -> bool:
    """Whether a row trains some weights in fp32 and the others as the reference does.

    Unsloth's full fine-tuning keeps the norms so. That is a choice of the library, and its page names it.
    """
    ours, theirs = set(row["trained_dtypes"]), set(reference["trained_dtypes"])
    return ours - theirs == {"float32"} and theirs <= ours


def judged(rows: Sequence[Measured]) -> tuple[list[Measured], list[dict[str, Any]]]:
    """The rows that agree, and those that do not, with the reasons as `refused`.

    A row is compared with Hugging Face's of its task and size if there is one, else with the first.
    """
    agreed: list[Measured] = []
    refused: list[dict[str, Any]] = []
    for row in rows:
        same = [one for one in rows if (one["task"], one["size"]) == (row["task"], row["size"])]
        reference = next((one for one in same if one["entry"] == "hf"), same[0])
        plain = {key: value for key, value in row.items() if key != "refused"}
        if reasons := disagreements(plain, reference):
            refused.append({**plain, "refused": reasons})
        else:
            agreed.append(plain)
    return agreed, refused
