"""Runs of a few steps that are measured.

profile.py        `tigon profile`: starts the processes of a profile, and writes its files
profiled_run.py   records the allocations of a run's first steps, and times the operators of one step
timed_run.py      times the steps of a run
comparison.py     the same steps with other kernels
"""
