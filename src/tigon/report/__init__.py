"""The parts of every report: of runs, plans, profiles, sweeps and benchmarks.

- `blocks.py`: a report as data, and its files. `page.py`: as an HTML page. `markdown.py`: as Markdown.
- `table.py`: a table for a page, for Markdown and for the terminal.
- `chart.py`: the look of every chart.
"""
