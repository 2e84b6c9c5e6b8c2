"""The recipe of a run.

keys.py          the pydantic model: every key that is not a technique's, with its default and its limits
aliases.py       names of other libraries for these keys
rules.py         checks of keys in relation to each other
recipe_file.py   YAML and `--set` to a `Recipe`, with the line of each error
"""
