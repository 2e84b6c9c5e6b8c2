"""Suites and libraries for `python -m benchmarks kernels`, beside those of `tigon bench kernels`.

- `suites.py`: the rows of each suite.
- `targets.py`: what tigon is to reach on them.
- `peers.py`: other libraries, and tigon with other settings and on other problems.
- `table.py`, `charts.py`: a record as Markdown and as charts.
"""
