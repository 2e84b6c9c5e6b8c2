"""The parts of every report: of runs, plans, profiles, sweeps and benchmarks.

- `blocks.py`: a report as data, and its files.
- `page.py`: a report as an HTML page; `page.html.j2` is the page's template, `style.css` its style sheet.
- `markdown.py`: a report as Markdown.
- `escape.py`: escapes text of users in Markdown.
- `table.py`: a table for a page, for Markdown and for the terminal.
- `chart.py`: the look of every chart.
"""
