"""Evaluations of a run besides the eval loss.

- `generations.py`: texts that the model writes for the prompts of `eval.generate`.
- `harness.py`: tasks of lm-evaluation-harness.
"""
