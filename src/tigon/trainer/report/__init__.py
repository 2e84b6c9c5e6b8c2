"""The output of a run: a live table and metrics.jsonl (progress.py), what its report shows (report.py, charts.py),
the same steps with other kernels (comparison.py), and the model card (model_card.py) with what vLLM makes of adapters
(vllm_rules.py).
"""
