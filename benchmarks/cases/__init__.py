"""The cases of `python -m benchmarks`: one file per measurement, which names its `CASE`."""
