"""Checks that stop a run before it wastes hours, and the messages for its faults.

preflight.py         packages, device, precision, sizes, disk space     recipe_warnings.py   settings that look wrong
self_test.py         the ops of the run on its GPU                      prediction.py        the planner's prediction
nan_guard.py         skips a step whose loss or gradient is not finite  fault_messages.py    errors, how to continue
system_limits.py     open files, file sizes, address space              console.py           a closed stdout or stderr
"""
