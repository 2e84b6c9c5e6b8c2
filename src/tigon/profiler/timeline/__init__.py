"""Turns a recording and its journal into a timeline of live memory (assemble.py, timeline.py), and draws it
(memory_chart.py).
"""
