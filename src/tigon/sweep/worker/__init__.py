"""The program of a point's process: `worker.py` reads its orders, `measure.py` measures one training run.

`samples.py` makes the samples of the run, `limit.py` sets its memory limit.
"""
