"""Compares whole training steps with other libraries: tokens/s, peak memory and time by kind, in one interleaved run.

- `cases.py`: what is trained: model, batch, sequence length, number format, memory limit.
- `variants.py`: how it is trained: tigon or a peer, what is recomputed, and the micro-batch.
- `trainee.py`: the weights, optimizer and data that all variants of a case share.
- `measure.py`: measures one case, with its variants taking turns.
- `time_by_kind.py`: splits the time of a profiled step into matmuls, attention, fused kernels, optimizer and rest.
- `planned.py`: the planner's choice for `auto`, and its predictions.
- `record.py`: the JSON record.
- `command.py`: the command `tigon bench train`.
- `table.py`: a case as Markdown.
"""
