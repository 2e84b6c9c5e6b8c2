"""Training objectives: one base for the trainer, one for the planner, and one file per objective.

base.py             The bases, and the dataclasses that objectives exchange with the trainer and the report.
causal_lm.py        Next-token prediction.
vision_language.py  Next-token prediction with images.
medusa.py           Prediction of later tokens, by heads on the model.
post_training/      The parts that dpo.py, kto.py, orpo.py, grpo.py, distill.py and reward.py share; TRL trains these.
choose.py           All objectives, and the choice of a recipe's.
rules/              What does not go with classification and post-training.
metric_sections.py  How reports show the metrics of each objective.
recipe_checks.py    Loads a recipe, with the rules of the objectives' sections, before transformers is imported.

To add an objective, write a file with a class and `OBJECTIVE = <class>`. `choose.py` finds it. Its recipe section is
declared in recipe/keys.py, and its rules in recipe_checks.py. An objective that TRL trains has its rules in
rules/post_training.py, and its loss is TRL's; `PlannedPostTraining.loss` imitates it for the planner.
"""

from __future__ import annotations
