"""Hugging Face with PEFT, Liger, Unsloth and tigon on one card: the same weights, data and optimizer.

    python -m benchmarks.duel --json RECORD --budget 540     # measures rows that the record lacks, for 540 s
    python -m benchmarks.duel --json RECORD --beside 3       # three rows prepare at once; each is timed alone
    python -m benchmarks.duel --json RECORD --tiny           # a small model on the CPU; without Unsloth

    entries.py    tasks, sizes, libraries and their settings, the most important first
    inputs.py     the weights, tokens and adapters that every row starts from
    steps.py      the timed steps, in a plain loop or in TRL's trainer
    libraries.py  loads a model as each library documents it
    agreement.py  decides whether two rows trained the same
    processes.py  the processes of rows, one after the other or several beside each other
    turns.py      a row's turn on the GPU, where several prepare beside each other
    __main__.py   runs each row in its own process, and keeps the record
    grpo.py       the update of a GRPO step and whole steps, by Unsloth's trainer and TRL's with tigon; no record yet

Each row is compared with Hugging Face's row of its task and size, or with the first row if that one is missing. A row
with other losses, dtypes or another number of trained weights is listed under `refused`, with the reason. Pages show no
figure of it.
"""
