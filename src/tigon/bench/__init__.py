"""Every op against its peers and the hardware's limit: time, memory and error, in one interleaved run.

suites.py    what is measured: rows of op and shape, and what a row must reach
impls.py     who is measured: tigon, the unfused formula, torch, torch.compile and the other kernel libraries
inputs.py    a row's tensors, and an implementation bound to them
accuracy.py  the error of outputs and gradients against fp64, and the rule it must obey
timing.py    eager and CUDA-graph times, implementations taking turns
measure.py   one row
record.py    what is written down, and in which environment
kernels.py   the command `tigon bench kernels`
table.py     a record as Markdown
charts.py    a record as charts
"""
