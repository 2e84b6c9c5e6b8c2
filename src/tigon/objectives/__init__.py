"""What a run learns: one protocol, which the trainer calls, and one file for each objective.

base.py         the protocol, and what the trainer hands to it
causal_lm.py    the next token
medusa.py       the tokens further ahead, by heads on the model
choose.py       the objective that a recipe asks for
asked.py        what a recipe asks of it, read before transformers is imported
"""

from __future__ import annotations
