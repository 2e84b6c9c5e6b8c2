"""The recipe keys that techniques read: typed fields, each declared once.

section.py    the base of all sections of a recipe: `key`, limits, conversions, and the words of errors
settings.py   `Settings`: the sections below, which a recipe, a plan and every technique share
model.py, train.py, lora.py, sharding.py   the sections

They are below the techniques' files, because a technique reads keys of other techniques too.
"""
