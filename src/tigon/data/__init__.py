"""Text to rows of tokens.

sources.py     `data.source` and `data.eval_source` to the list of regular files that are read
documents.py   text and JSONL files to documents, each with its file and line
tokenizer.py   the checkpoint's tokenizer, or a byte-level BPE that is trained on the data
packing.py     documents to rows of tokens, labels and positions, and the collator
"""
