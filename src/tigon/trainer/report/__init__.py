"""The output of a run.

run_lines.py     the lines before the first step and after the last one
watchers.py      the callbacks that show and record a run while it trains
progress.py      a live table or plain lines, and metrics.jsonl
tracking.py      the trackers of `train.report_to`
report.py        report.md and report.html
charts.py        the report's charts
model_card.py    README.md beside saved weights
vllm_rules.py    whether vLLM can serve a folder of adapters
"""
