"""`tigon profile` from Python: profile a step of a recipe, and read the parts of its peak from the data.

It works on the CPU and on CUDA. `profile.html` in the folder shows the live memory over the step.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
RECIPE = "examples/first-run/recipe.yaml"
CHANGES = ["--set", "model.kernels=none"]  # leave them out to profile the step with tigon's kernels

with tempfile.TemporaryDirectory() as name:
    folder = Path(name) / "profile"  # name your own folder to keep profile.html
    command = [sys.executable, "-m", "tigon", "profile", RECIPE, "--steps", "1", *CHANGES, "--out", str(folder)]
    subprocess.run(command, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
    page = (folder / "profile.html").read_text(encoding="utf-8")
    peak = json.loads((folder / "profile.json").read_text(encoding="utf-8"))["peak"]

parts = {part: size / 2**20 for part, size in peak["components"].items()}
largest = max(parts, key=lambda part: parts[part])
print(f"profile.html has {len(page) // 1024} KiB")
print(f"the peak is {peak['nbytes'] / 2**20:.0f} MiB in {peak['phase']['name']}")
print(f"the largest part of it is {largest} with {parts[largest]:.0f} MiB")
assert largest == "logits" and sum(parts.values()) == peak["nbytes"] / 2**20
