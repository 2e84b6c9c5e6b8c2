"""A training run on Hugging Face's Trainer.

run.py            `tigon train`, in order             prepare.py        everything before the run folder exists
engine.py         the model with its techniques       model.py          the model as the recipe names it
trainer.py        the Trainer subclass, its arguments run_folder.py     the run folder: new, or one to resume
first_phase.py    training that an objective asks for before the run's own
timed_run.py, profiled_run.py    a run whose steps are timed, or whose allocations are recorded

checkpoint/    saved whole or not at all; states that DeepSpeed keeps in files
distributed/   processes, signals, and what DeepSpeed needs
guards/        checks before and during a run, and the messages of faults
report/        progress lines, charts, report.md and report.html
"""
