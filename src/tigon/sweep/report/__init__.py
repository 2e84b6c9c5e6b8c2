"""`report.py` writes report.md and report.html from results.json, `charts.py` draws their bars and lines."""
