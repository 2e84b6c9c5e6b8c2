"""The program of a point's process: `worker.py` carries out an order, `measure.py` measures one training run.

`orders.py` takes orders and writes answers. `samples.py` makes the samples of the run, `limit.py` limits its memory.
"""
