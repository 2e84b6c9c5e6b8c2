"""The files of a sweep, their checks, and what is computed from them.

`folder.py` reads and writes the results folder. `schema.py` checks every JSON file that is read. `results.py` combines
the repeats of a point.
"""
