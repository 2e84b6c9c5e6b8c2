"""The output of a run.

watchers.py      the callbacks that show and record a run while it trains
progress.py      a live table or plain lines, and metrics.jsonl
tracking.py      the trackers of `train.report_to`
report.py        report.md and report.html
charts.py        the report's charts
comparison.py    the same steps with other kernels
model_card.py    README.md beside saved weights
vllm_rules.py    whether vLLM can serve a folder of adapters
"""
