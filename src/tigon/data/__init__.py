"""Turns text and rows into sequences of tokens.

- `source/`: reads the files, data sets and built-in text of a recipe as documents.
- `chat/`: reads chat messages, and turns them into text with a chat template.
- `documents.py`: what a document is. `document_table.py`: documents in an Arrow file, and which are held out.
- `cache.py`: the folders of Arrow files, which later runs with the same data read.
- `tokenizer.py`: the checkpoint's tokenizer, or a byte-level BPE trained on the data. It tokenises documents.
- `tokens.py`: the tokens of all documents in an Arrow file, made by several processes.
- `packing.py`: packs tokens into sequences of tokens, labels and positions. It also has the collator.
- `image_rows.py`, `images.py`: rows with images, and their tokens and batches.
- `preferences.py`: rows for post-training, and the data set of them that TRL's trainers take.
- `preview.py`: prints the formats of the rows, and rows as tokens.
"""
