"""One file per command. The file's name is the command's name, and its `COMMAND` is found by `app.py`."""
