"""From a recording and its journal to what was alive when (assemble.py, timeline.py), and as a drawing
(timeline_chart.py).
"""
