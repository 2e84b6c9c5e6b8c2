"""The command line: one file per command that has more than flags, and `app.py`, which declares the flags.

Commands import what they run when they run, because `tigon --help` must not wait for torch.
"""
