"""Reads `data.source` and `data.eval_source`.

- `sources.py`: the entries of the two keys, and the regular files in them.
- `rows.py`: reads JSONL, JSON, CSV and parquet files, and data sets of the hub, as rows.
- `formats.py`: recognises the format of a row, and makes a document of it.
- `reading.py`: reads all sources into an Arrow file, each document with its file and line.
"""
