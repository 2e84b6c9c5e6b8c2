"""Shows the results of `tigon plan`: text and JSON (terminal.py), `--explain` (explain.py), `--plot` (charts.py), and
the recipe that runs it (as_recipe.py).
"""
