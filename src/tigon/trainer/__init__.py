"""A training run on Hugging Face's Trainer.

run.py              the steps of `tigon train`
setup.py            what a run is made of: its recipe and techniques, its model's shape, its data
prepare.py          checks of recipe, model and machine before the run folder exists
run_data.py         reads, tokenises and packs the rows
model.py            loads the model that the recipe names
engine.py           builds the model with its techniques
arguments.py        the arguments of every Trainer, and the optimizer
trainer.py          makes the Trainer of a run
guarded.py          the one subclass of Trainer
step.py             one training step, in order
first_phase.py      training that an objective needs before the run's own
family_training.py  `tigon models --train`: trains a small model of a family

checkpoint/      atomic checkpoints; the files of DeepSpeed's NVMe offload
distributed/     processes, signals, and fixes for DeepSpeed
evaluation/      the eval loss, texts and benchmarks
folder/          the run folder
guards/          checks before and during a run, and the messages of faults
measuring/       profiles, timed steps, and the same steps with other kernels
post_training/   trainers of TRL with the same guards
report/          progress lines, charts, report.md and report.html
"""
