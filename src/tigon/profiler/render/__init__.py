"""Output of profiles.

- `tables.py`, `op_table.py`, `peak_report.py`: text tables.
- `page.py`: profile.html. `figure.py`: the look of every chart.
- `result.py`: reads and writes profile.json.
"""
