"""`tigon sweep`: train one recipe over a grid of its keys and a list of variants, each point in its own process.

- `definition.py`: reads the sweep file (base recipe, grid, variants, what is measured).
- `points.py`: expands it into points. A point has a resolved recipe, or the reason why the recipe is refused.
- `run.py`: the loop over the points, with order, time limit, resuming and progress.
- `processes.py`: starts and ends the points' processes. `worker.py` is the program that each process runs.
- `self_test.py`: tests the kernels once for all points.
- `measure.py`: measures one training run. `rows.py` makes its samples, `limit.py` sets the memory limit.
- `prediction.py`: the planner's prediction for a point.
- `failures.py`: tells out of memory from other failures, by the exception or by the exit code and log.
- `folder.py`: the results folder. `results.py` combines the repeats of a point.
- `import_results.py`: imports points from an earlier results.json. `schema.py` checks every JSON file that is read.
- `report.py`: report.md and report.html. `charts.py` draws the bars and lines.
"""
