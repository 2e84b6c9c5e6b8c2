"""Compares every op with its formula, PyTorch, Liger and the hardware's limit: time, memory and error, in turns.

- `rows.py`: the rows (op and shape) of each suite.
- `impls.py`: the implementations: tigon, the unfused formula, torch, torch.compile and Liger.
- `inputs.py`: makes a row's tensors, and binds an implementation to them.
- `numerical_errors.py`: errors of outputs and gradients against fp64, and the limit on them.
- `timing.py`: eager and CUDA-graph times, with implementations taking turns.
- `measure.py`: measures one row.
- `record.py`: the JSON record with its environment.
- `session.py`: the record's file, a time limit and the end, for both commands.
- `kernels.py`: the command `tigon bench kernels`.
- `table.py`: a row as Markdown.
- `training/`: the command `tigon bench train`, which measures whole steps.

The repository's own suites, libraries and pages are in `benchmarks/`, outside the wheel.
"""
