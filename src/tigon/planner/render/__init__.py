"""Shows the results of `tigon plan`.

terminal.py     text and JSON
json_names.py   the names of the techniques' keys in the JSON
explain.py      `--explain`: the terms of each number
charts.py       `--plot`: memory by batch and by sequence
as_recipe.py    the recipe that runs the plan
"""
