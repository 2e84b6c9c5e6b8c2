"""What the objectives that TRL's trainers carry out share.

objective.py  Their base class: rows, the trainer of TRL with its config, and metrics.
planned.py    Their base class for the planner, which traces their steps.
rules.py      The recipe keys that each of them takes, and what does not go with them. Imports no torch.
"""
