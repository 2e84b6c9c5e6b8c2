"""Training runs: a recipe (frozen dataclasses from YAML), data, and the run itself on Hugging Face Trainer.

recipe.py      the recipe: every key, its limits, YAML and --set          needs no torch
documents.py   text and JSONL files -> documents, each with its file and line
tokenizer.py   the model's tokenizer, or a byte-level BPE trained on the spot
packing.py     documents -> rows of tokens, labels and positions; the collator
folder.py      the run folder: created last, resumed only when it is ours
preflight.py   everything that can be refused before the folder exists
trainer.py     the Trainer subclass and its arguments
progress.py    callbacks: live table, plain lines, metrics.jsonl
comparison.py  the same steps with different kernels: loss, peak memory, tokens/s
report.py      report.md and report.html
run.py         the order of all of the above
"""
