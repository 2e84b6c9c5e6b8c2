"""The report of a sweep as data: `report.py` makes its texts and tables, `charts.py` its bars and lines."""
