"""Checks that a patched model computes the same as the unpatched model.

tiny.py      small random models of any family     probe.py    one module against its op, before it is patched
verify.py    one family, patched against unpatched  small_models.py   small models of all other families
listing.py   the results as a table
"""
