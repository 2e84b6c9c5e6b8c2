"""Training runs: a recipe (frozen dataclasses from YAML), data, and the run itself on Hugging Face Trainer.

recipe.py      the recipe: every key, its limits, YAML and --set          needs no torch
documents.py   text and JSONL files -> documents, each with its file and line
tokenizer.py   the model's tokenizer, or a byte-level BPE trained on the spot
packing.py     documents -> rows of tokens, labels and positions; the collator
folder.py      the run folder: created last, resumed only when it is ours
preflight.py   everything that can be refused before the folder exists
prepare.py     recipe, text and machine -> what a run trains with, before the folder exists
trainer.py     the Trainer subclass and its arguments
checkpoint.py  checkpoints: complete or not there, compared with their manifest before they are used
swapping.py    states that DeepSpeed keeps in files, and gets back from a checkpoint
finite.py      the gate that leaves out a step whose loss or gradient is not finite
stopping.py    SIGTERM and SIGINT: a checkpoint at the end of the step
console.py     stdout and stderr that close or fail, which end no run
limits.py      the system's limits on open files, a file's size and memory, in words
extension_lock.py  the lock file of operators that DeepSpeed compiles, where a killed process left one
self_check.py  ops that are wrong on this GPU, left out of the patch
faults.py      what is said of a fault, and what a resumed run is refused for
progress.py    callbacks: live table, plain lines, metrics.jsonl
comparison.py  the same steps with different kernels: loss, peak memory, tokens/s
report.py      report.md and report.html
run.py         the order of all of the above
"""
