"""Output of profiles.

- `tables.py`, `op_table.py`, `peak_report.py`: text tables.
- `page.py`, `page.js`: profile.html.
- `result.py`: reads and writes profile.json.
"""
