"""Training objectives: one protocol for the trainer, one for the planner, and one file per objective.

base.py             The protocols, and the dataclasses that objectives exchange with the trainer and the report.
causal_lm.py        Next-token prediction.
medusa.py           Prediction of later tokens, by heads on the model.
choose.py           All objectives, and the choice of a recipe's.
recipe_checks.py    Loads a recipe, with the rules of the objectives' sections, before transformers is imported.

To add an objective, write a file with its two classes and add it to `choose.OBJECTIVES`. Its recipe section is declared
in recipe/keys.py, and its rules in recipe_checks.py.
"""

from __future__ import annotations
