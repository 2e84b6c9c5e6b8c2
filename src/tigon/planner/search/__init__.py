"""Finds the recipes that fit a GPU.

space.py           the settings that the planner may change, and their order
recommend.py       the search, fastest first
checkpointing.py   what each layer recomputes: `train.checkpointing: auto`
option.py          a configuration and its estimate
largest_batch.py   the largest batch, and the longest sequence, of one configuration
pool.py            runs a function in a forked process
"""
