"""A training run on Hugging Face's Trainer.

run.py              the steps of `tigon train`
prepare.py          checks and data before the run folder exists
run_folder.py       creates a run folder or finds one to resume
open_folder.py      opens the run folder together with the other processes
run_lines.py        the lines that a run prints before its first step and after its last one
model.py            loads the model that the recipe names
engine.py           builds the model with its techniques, and makes the optimizer
trainer.py          the Trainer of an ordinary run, and the arguments of every Trainer
post_training.py    trainers of TRL with the same guards
rewards.py          reward functions that a recipe names
first_phase.py      training that an objective needs before the run's own
guarded.py          the one subclass of Trainer
step.py             one training step, in order
speed.py            tokens/s and memory
timed_run.py        times the steps of a run
profile.py          `tigon profile`: starts the processes of a profile, and writes its files
profiled_run.py     records the allocations of a run's first steps, and times the operators of one step
family_training.py  `tigon models --train`: trains a small model of a family

checkpoint/    atomic checkpoints; the files of DeepSpeed's NVMe offload
distributed/   processes, signals, and fixes for DeepSpeed
evaluation/    the eval loss, texts and benchmarks
guards/        checks before and during a run, and the messages of faults
report/        progress lines, charts, report.md and report.html
"""
