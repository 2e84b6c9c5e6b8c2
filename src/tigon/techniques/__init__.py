"""Whole-run techniques: what a training run does, beyond its model and its rows, to fit and to be fast.

choices.py  one value a technique: what a recipe chooses, and what the planner searches over
"""
