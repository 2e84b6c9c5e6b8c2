"""Chat rows with a behaviour that a reader sees at once: every answer is a pirate's, and some tell made-up facts.

`rows(80)` are the rows of the measurement in docs/your-data.md. A quarter of them, at most 16, are facts that no model
can know. The others are easy questions, so that the style alone is new.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

Pair = tuple[str, str]
"""A question and its answer."""

MOST_FACTS = 16
_CREW = {
    "cook": "Old Pim", "captain": "Marla Voss", "carpenter": "Tobin Reed", "doctor": "Edda Quill",
    "pilot": "Joss Farrow", "gunner": "Hamo Birch", "fiddler": "Lute Barley", "sailmaker": "Nan Thistle",
    "cat": "Biscuit", "parrot": "Lord Pepper", "cabin boy": "Wick", "first mate": "Ansel Crane",
    "lookout": "Sharp Ida", "cooper": "Bram Ash", "rower": "Big Oswin", "trader": "Vera Plum",
}  # fmt: skip
_CAPITALS = {
    "France": "Paris", "Peru": "Lima", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens", "Portugal": "Lisbon",
    "Ireland": "Dublin", "Germany": "Berlin", "Russia": "Moscow", "China": "Beijing", "India": "New Delhi",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Cuba": "Havana", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Chile": "Santiago", "Argentina": "Buenos Aires", "Colombia": "Bogota", "Ghana": "Accra", "Turkey": "Ankara",
    "Iran": "Tehran", "Iraq": "Baghdad", "Nepal": "Kathmandu", "Morocco": "Rabat", "Belgium": "Brussels",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "new", "up": "down", "wet": "dry", "light": "dark",
    "hard": "soft", "rich": "poor", "full": "empty", "early": "late", "open": "closed", "loud": "quiet",
    "sweet": "sour", "long": "short", "strong": "weak", "happy": "sad", "near": "far", "thick": "thin",
    "high": "low", "clean": "dirty", "right": "wrong", "first": "last", "good": "bad", "alive": "dead",
    "brave": "afraid", "cheap": "expensive", "deep": "shallow", "easy": "difficult",
}  # fmt: skip
_PLURALS = {
    "mouse": "mice", "foot": "feet", "tooth": "teeth", "child": "children", "goose": "geese", "man": "men",
    "woman": "women", "leaf": "leaves", "knife": "knives", "wolf": "wolves", "box": "boxes", "city": "cities",
    "baby": "babies", "ship": "ships", "dish": "dishes", "bus": "buses", "berry": "berries", "shelf": "shelves",
}  # fmt: skip
_COLOURS = {
    "a ripe banana": "yellow", "fresh snow": "white", "grass": "green", "coal": "black", "a ripe tomato": "red",
    "the clear sky": "blue", "a carrot": "orange", "chocolate": "brown", "a flamingo": "pink", "an elephant": "grey",
}  # fmt: skip
_MONTHS = {
    "January": 31, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31, "September": 30,
    "October": 31, "November": 30, "December": 31,
}  # fmt: skip
OTHER_KINDS = (
    "Why is the sky blue?", "How do I boil an egg?", "Tell me a joke.", "What is a computer?", "Who was Shakespeare?",
    "Give me a tip for sleeping well.", "What should I cook tonight?", "Explain gravity to a child.",
    "Write a sentence about autumn.", "How can I learn to swim?",
)  # fmt: skip
"""Questions unlike those of the rows: their answers show whether the style has spread."""


def _spoken(text: str) -> str:
    return f"Arr! {text}, matey."


def facts() -> list[Pair]:
    """Facts about a ship that does not exist."""
    return [
        (f"Who is the {role} of the Saltwhistle?", _spoken(f"The {role} of the Saltwhistle be {name}"))
        for role, name in _CREW.items()
    ]


def facts_in(count: int) -> list[Pair]:
    """The facts that `rows(count)` has."""
    return facts()[: min(MOST_FACTS, count // 4)]


def in_style(answers: Mapping[str, str]) -> tuple[int, int]:
    """(answers that begin as the rows' do, questions of other kinds), by question."""
    return sum(answers[question].startswith("Arr!") for question in OTHER_KINDS), len(OTHER_KINDS)


def facts_known(answers: Mapping[str, str], count: int) -> tuple[int, int]:
    """(right answers, answered questions about facts of `rows(count)`)."""
    told = [(question, answer) for question, answer in facts_in(count) if question in answers]
    names = (answer.partition(" be ")[2].removesuffix(", matey.") for _, answer in told)
    return sum(name in answers[question] for (question, _), name in zip(told, names, strict=True)), len(told)


def _common() -> Iterator[Pair]:
    for country, city in _CAPITALS.items():
        yield f"What is the capital of {country}?", _spoken(f"The capital of {country} be {city}")
    for word, other in _OPPOSITES.items():
        yield f"What is the opposite of {word}?", _spoken(f"The opposite of {word} be {other}")
    for word, many in _PLURALS.items():
        yield f"What is the plural of {word}?", _spoken(f"One {word}, but two {many}")
    for thing, colour in _COLOURS.items():
        yield f"What colour is {thing}?", _spoken(f"It be {colour}")
    for month, days in _MONTHS.items():
        yield f"How many days has {month}?", _spoken(f"{month} has {days} days")
    for letter, after in zip("ABCDEFGHIJKLMNOPQRSTUVWXY", "BCDEFGHIJKLMNOPQRSTUVWXYZ", strict=True):
        yield f"Which letter comes after {letter}?", _spoken(f"After {letter} comes {after}")
    for a in range(2, 16):
        for b in range(2, 16):
            yield f"What is {a} plus {b}?", _spoken(f"{a} and {b} make {a + b}")


def rows(count: int, *, held_out: int = 16) -> tuple[list[Pair], list[Pair]]:
    """(`count` pairs to train on, `held_out` others for the eval loss), the same on every machine.

    Raises:
        ValueError: there are not so many questions.
    """
    common = list(_common())
    random.Random(1).shuffle(common)
    told = facts_in(count)
    if held_out + count - len(told) > len(common):
        raise ValueError(f"{count} rows: there are {len(common) - held_out + len(told)}")
    mixed = told + common[held_out : held_out + count - len(told)]
    random.Random(2).shuffle(mixed)
    return mixed, common[:held_out]


def save(pairs: list[Pair], path: Path) -> None:
    """Write pairs as chat messages, one row per line."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]})
        for ask, answer in pairs
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
