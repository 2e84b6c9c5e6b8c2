"""Turns text into sequences of tokens.

- `sources.py`: lists the regular files that `data.source` and `data.eval_source` name.
- `documents.py`: reads text and JSONL files as documents, each with its file and line.
- `tokenizer.py`: the checkpoint's tokenizer, or a byte-level BPE trained on the data.
- `packing.py`: packs documents into sequences of tokens, labels and positions. It also has the collator.
"""
