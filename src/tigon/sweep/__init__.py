"""`tigon sweep`: one recipe over a grid of its keys and a list of variants, every point trained in its own process.

definition.py   the sweep file: base recipe, grid, variants, what is measured
points.py       its points: a resolved recipe each, or the reason why there is none
run.py          the loop: order, time limit, resuming, progress
processes.py    the processes of the points, and their end; worker.py is one of them
self_test.py    the kernels tried, once for all points
measure.py      the training that it watches; rows.py the rows, limit.py the memory limit, prediction.py the planner
failures.py     out of memory, or another failure: from an exception, or from what a process left behind
folder.py       the results folder; results.py what a point's repeats come to; taken.py rows of earlier results
forms.py        what is read back, checked
report.py       report.md and report.html; charts.py bars and lines
study.py        docs/study.md from the committed records; blocks.py its tables, published.py the figures of others
"""
