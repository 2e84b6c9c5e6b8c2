"""The output of a run: a live table and metrics.jsonl (progress.py), report.md and report.html (report.py, charts.py),
and the same steps with other kernels (comparison.py).
"""
