"""Compares every op with other libraries and the hardware's limit: time, memory and error, in one interleaved run.

- `suites.py`: the rows (op and shape) of each suite, with their targets.
- `impls.py`: the implementations: tigon, the unfused formula, torch, torch.compile and other kernel libraries.
- `inputs.py`: makes a row's tensors, and binds an implementation to them.
- `numerical_errors.py`: errors of outputs and gradients against fp64, and the limit on them.
- `timing.py`: eager and CUDA-graph times, with implementations taking turns.
- `measure.py`: measures one row.
- `record.py`: the JSON record with its environment.
- `kernels.py`: the command `tigon bench kernels`.
- `session.py`: places to write, time limit and end, for both commands.
- `report.py`: the command `tigon bench report`.
- `table.py`, `charts.py`: a record as Markdown and as charts.
"""
