"""Profiles the memory and time of training steps.

- `recording/`: records every allocation with its operator and Python line, on the CPU and on CUDA.
- `timeline/`: turns a recording into a timeline of the live memory.
- `render/`: tables, charts and profile.html.
"""
