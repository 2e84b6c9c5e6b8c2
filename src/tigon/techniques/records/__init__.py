"""The records that a technique's file is made of.

choices.py     the values that a run chooses, one typed field per setting
setting.py     the record of a setting: recipe key, flag, allowed values, what the planner does with it
technique.py   the record of a technique: memory, time, result, hooks; and `Declaration`, what one file declares
condition.py   conditions on choices, and exclusions, as data
"""
