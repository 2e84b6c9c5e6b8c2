"""Which recipes fit a GPU.

space.py           what the planner may change, and in which order, as data
recommend.py       the search, fastest first
largest_batch.py   the largest batch, and the longest sequence, of one configuration
pool.py            a computation in a forked process
"""
