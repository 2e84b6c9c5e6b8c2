"""`tigon medusa`: train a recipe with `heads:`."""

from __future__ import annotations

from tigon.cli.options import Assignments, Gpus, Recipe, Resume
from tigon.cli.shared import Command, gpus_as_override
from tigon.objectives.recipe_checks import require_heads
from tigon.trainer.guards import console


def command(
    recipe: Recipe,
    assignments: Assignments = None,
    gpus: Gpus = None,
    resume: Resume = False,
) -> None:
    """Train heads that predict several tokens ahead (Medusa, MTP), with a report at the end.

    The recipe has the section `heads:`; docs/medusa.md lists its keys.
    """
    from tigon.trainer import run  # not for --help

    with console.survive_broken_streams():
        run.train(recipe, [*(assignments or ()), *gpus_as_override(gpus)], resume=resume, require=require_heads)


COMMAND = Command(command, place=2)
