"""Writes the tables of docs/trainers.md from `trl_cases`: `python tests/integrations/trainers_page.py`."""

from __future__ import annotations

from pathlib import Path

from trl_cases import CASES, EVERY, FSDP2, FUSED, LANGUAGE_MODELS, REFUSED, UNFUSED, ZERO3, Case

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "trainers.md"
BEGIN, END = "<!-- from tests/integrations/trl_cases.py -->", "<!-- end of the tables -->"

WORDS = {FUSED: "fused", UNFUSED: "**unfused**", REFUSED: "**refused** by TRL"}


def tables() -> str:
    """Both tables, between their markers."""
    by_place = {(case.trainer, case.option): case for case in CASES}
    head = [
        "| option |" + "".join(f" {trainer} |" for trainer in LANGUAGE_MODELS),
        "|---|" + "---|" * len(LANGUAGE_MODELS),
    ]
    rows = [
        f"| {option} |" + "".join(f" {WORDS[by_place[trainer, option].state]} |" for trainer in LANGUAGE_MODELS)
        for option in EVERY
    ]
    for engine, states in (("FSDP2", FSDP2), ("DeepSpeed ZeRO-3", ZERO3)):
        rows.append(f"| {engine}, two processes |" + "".join(f" {WORDS[states[one]]} |" for one in LANGUAGE_MODELS))
    others = [case for case in CASES if case.trainer not in LANGUAGE_MODELS or case.option not in EVERY]
    listed = ["| trainer | option | state |", "|---|---|---|", *(_one(case) for case in others)]
    return "\n".join([BEGIN, *head, *rows, "", *listed, END])


def _one(case: Case) -> str:
    note = f": {case.note}" if case.note else ""
    return f"| {case.trainer} | {case.option} | {WORDS[case.state]}{note} |"


def render(text: str) -> str:
    """The page's text with its tables written again."""
    before, _, rest = text.partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(REPOSITORY)}")
