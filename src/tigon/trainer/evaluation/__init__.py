"""Evaluations of a run: the eval loss, texts, and benchmarks.

- `token_mean.py`: the eval loss, which is the exact mean over tokens.
- `generations.py`: texts that the model writes for the prompts of `eval.generate`.
- `sample_prompt.py`: the prompt of the report's text sample, if the recipe gives none.
- `harness.py`: tasks of lm-evaluation-harness.
"""
