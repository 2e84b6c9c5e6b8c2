"""`tigon sweep`: train one recipe over a grid of its keys and a list of variants, each point in its own process.

- `definition.py`: reads the sweep file (base recipe, grid, variants, what is measured).
- `points.py`: expands it into points. A point has a resolved recipe, or the reason why the recipe is refused.
- `run.py`: the loop over the points, with order, time limit, resuming and progress.
- `one_point.py`: runs one point, makes its record, and asks the planner for its prediction.
- `self_test.py`: tests the kernels once for all points.
- `processes.py`: starts and ends the points' processes.
- `failures.py`: tells out of memory from other failures, by the exception or by the exit code and log.
- `worker/`: the program of a point's process, which measures one training run.
- `folder.py`, `schema.py`: the files of a sweep, and their checks.
- `results.py`: what is computed from the records.
- `report.py`, `charts.py`: report.md and report.html, with their charts.
"""
