"""A training run on Hugging Face's Trainer.

run.py            the steps of `tigon train`            prepare.py        checks and data before the run folder exists
engine.py         builds and saves the model            model.py          loads the model that the recipe names
guarded.py        the one subclass of Trainer           step.py           one training step, in order
trainer.py        the Trainer's arguments               run_folder.py     creates a run folder or finds one to resume
post_training.py  trainers of TRL with the same guards  speed.py          tokens/s and memory
first_phase.py    training that an objective needs before the run's own
timed_run.py      times the steps of a run              profiled_run.py   records the allocations of a run

checkpoint/    atomic checkpoints; the files of DeepSpeed's NVMe offload
distributed/   processes, signals, and fixes for DeepSpeed
evaluation/    the eval loss, texts and benchmarks
guards/        checks before and during a run, and the messages of faults
report/        progress lines, charts, report.md and report.html
"""
