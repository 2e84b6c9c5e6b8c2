"""Reward functions for recipes and for TRL's GRPOTrainer: `post_training.rewards: [tigon.rewards:exact_answer]`.

text.py   exact_answer, answer_format and length, from the text of a completion
code.py   passes_tests, which runs the completion's Python in a limited process; off by default

Each takes the completions and the columns of the rows as lists, as TRL passes them, and returns a number for each
completion. Arguments after `*` come from the recipe: `{function: tigon.rewards:length, arguments: {most: 200}}`, or
from `functools.partial`.
"""

from tigon.rewards.code import passes_tests
from tigon.rewards.text import answer_format, exact_answer, length, text_of

__all__ = ["answer_format", "exact_answer", "length", "passes_tests", "text_of"]
