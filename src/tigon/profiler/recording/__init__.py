"""Records every allocation with the operator and the Python line that made it.

- `cpu.py`, `cuda.py`: the recorders.
- `journal.py`: phases and categories. `watch.py` has the hooks that fill the journal.
- `frames.py`: shortens Python frames for readers.
- `peak.py`: the peak memory of a section of code.
- `device_memory.py`: the total and used memory of a device, and the free memory of the host.
"""
