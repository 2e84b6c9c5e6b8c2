"""Evaluations of a run: the eval loss, texts, and benchmarks.

- `token_mean.py`: the eval loss, which is the exact mean over tokens.
- `generations.py`: texts that the model writes for the prompts of `eval.generate`.
- `prompts.py`: the prompts of `eval.generate` and of the text sample.
- `generate.py`: generates text with the model of a run; the text sample of the report.
- `harness.py`: tasks of lm-evaluation-harness.
"""
