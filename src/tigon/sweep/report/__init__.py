"""What the report of a sweep shows: `report.py` its texts and tables, `charts.py` its bars and lines."""
