"""Profiles for readers: tables.py, op_table.py and peak_report.py make text, page.py makes profile.html, figure.py sets
the look of every chart, result.py reads and writes profile.json.
"""
