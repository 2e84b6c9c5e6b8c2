"""The command line: one file per command, with its flags and the call that they become.

`app.py` puts the commands together and turns errors into one line on stderr. Commands import heavy libraries
(transformers, rich, matplotlib) when they run, so that `tigon --help` does not wait for them.
"""
