"""Turns text and rows into sequences of tokens.

- `sources.py`: the entries of `data.source` and `data.eval_source`, and the regular files in them.
- `rows.py`: reads JSONL, JSON, CSV and parquet files, and data sets of the hub, as rows.
- `formats.py`, `messages.py`: recognise the format of a row, and make a document of it.
- `documents.py`: what a document is. `document_table.py`: documents in an Arrow file, and which are held out.
- `reading.py`: reads all sources into such a file, each document with its file and line.
- `cache.py`: the folders of Arrow files, which later runs with the same data read.
- `chat_template.py`: turns messages into text, and finds the assistant's turns in it.
- `render_chat.py`: calls a chat template, which may fail or never end.
- `tokenizer.py`: the checkpoint's tokenizer, or a byte-level BPE trained on the data. It tokenises documents.
- `tokens.py`: the tokens of all documents in an Arrow file, made by several processes.
- `packing.py`: packs tokens into sequences of tokens, labels and positions. It also has the collator.
- `image_rows.py`, `images.py`: rows with images, and their tokens and batches.
- `preferences.py`: rows for post-training, and the data set of them that TRL's trainers take.
- `preview.py`, `row_notes.py`: print the formats of the rows, rows as tokens, and what a row does not teach.
"""
