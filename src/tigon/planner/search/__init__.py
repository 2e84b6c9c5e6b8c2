"""Finds the recipes that fit a GPU.

space.py           the settings that the planner may change, and their order
recommend.py       the search, and the order of what it finds
checkpointing.py   what each layer recomputes: `train.checkpointing: auto`
option.py          a configuration and its estimate
largest_batch.py   the largest batch, and the longest sequence, of one configuration
longest.py         the longest row of a recipe, by kind of recomputation
pool.py            runs a function in a forked process
"""
