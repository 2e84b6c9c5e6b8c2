"""Hugging Face with PEFT, Liger, Unsloth and tigon on one card: the same weights, data and optimizer.

    python -m benchmarks.duel --json RECORD --budget 540     # measures rows that the record lacks, for 540 s
    python -m benchmarks.duel --json RECORD --tiny           # a small model on the CPU; without Unsloth

entries.py    what is measured: tasks, sizes, libraries and their settings, in order of importance
inputs.py     the weights, tokens and adapters that every row starts from
steps.py      the timed steps, in a plain loop or in TRL's trainer
libraries.py  loads a model as each library documents it
agreement.py  when two rows trained the same
__main__.py   runs each row in a process of its own, and keeps the record

A row whose losses, dtypes or number of trained weights differ from those of the first row of its task and size has no
speed in the record: it is listed under `refused`, with the reason.
"""
