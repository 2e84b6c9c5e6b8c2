"""The recipe of a run.

keys.py          frozen dataclasses: every key, its default and its limits
recipe_file.py   YAML and `--set` to a `Recipe`, with the line of each error

Neither imports torch.
"""
