"""The command line.

`commands/` has one file per command, which declares its flags and calls the library. `app.py` combines the commands
and prints errors as one line on stderr. Commands import heavy libraries (transformers, rich, matplotlib) when they run,
so that `tigon --help` does not wait for them.
"""
