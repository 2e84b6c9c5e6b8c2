"""Every allocation with the operator and the line that made it.

cpu.py, cuda.py   the recorders                  frames.py    Python frames as readers see them
journal.py        phases and categories          watch.py     the hooks that fill it
device.py         how much a device holds        peak.py      the peak of a stretch of code
quiet.py          standard error without PyTorch's warnings
"""
