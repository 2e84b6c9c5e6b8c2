"""Profiles the memory and time of training steps.

- `recording/`: records every allocation with its operator and Python line, on the CPU and on CUDA.
- `timeline/`: turns a recording into a timeline of the live memory.
- `render/`: tables, charts and profile.html.

`PeakMeter` measures the peak of your own code:

    meter = tigon.profiler.PeakMeter(device)
    meter.start(tigon.profiler.training_state(model, optimizer))
    step()
    print(meter.stop().step_bytes)
"""

from tigon.profiler.recording.peak import Peak, PeakMeter, training_state

__all__ = ["Peak", "PeakMeter", "training_state"]
