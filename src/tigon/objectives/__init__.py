"""Training objectives: one protocol, which the trainer calls, and one file per objective.

base.py             The protocol and the dataclasses that the trainer passes to it.
causal_lm.py        Next-token prediction.
medusa.py           Prediction of later tokens, by heads on the model.
choose.py           Chooses the objective of a recipe.
recipe_checks.py    Checks of a recipe that run before transformers is imported.
"""

from __future__ import annotations
