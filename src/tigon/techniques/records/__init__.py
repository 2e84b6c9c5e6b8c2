"""The records that a technique's file is made of.

technique.py   the record of a technique: memory, time, result, hooks; and `Declaration`, what one file declares
condition.py   conditions on recipe keys, exclusions, and keys that have no effect without another, as data
"""
