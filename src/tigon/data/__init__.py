"""Turns text and rows into sequences of tokens.

- `sources.py`: the entries of `data.source` and `data.eval_source`, and the regular files in them.
- `row_files.py`, `hub_datasets.py`: read JSONL, JSON, CSV and parquet files, and data sets of the hub, as rows.
- `formats.py`, `messages.py`: recognise the format of a row, and make a document of it.
- `documents.py`: what a document is, and which ones are held out for evaluation.
- `reading.py`: reads all sources as documents, each with its file and line.
- `chat_template.py`: turns messages into text, and finds the assistant's turns in it.
- `render_chat.py`: calls a chat template, which may fail or never end.
- `tokenizer.py`: the checkpoint's tokenizer, or a byte-level BPE trained on the data.
- `token_cache.py`: keeps tokenised documents for the next run with the same data.
- `packing.py`: packs documents into sequences of tokens, labels and positions. It also has the collator.
- `preferences.py`: rows for post-training.
- `preview.py`: prints the formats of the rows, and rows as tokens.
"""
