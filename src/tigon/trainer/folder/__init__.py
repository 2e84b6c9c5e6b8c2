"""The run folder.

run_folder.py    its files; creates one, or finds one to resume
open_folder.py   opens it together with the other processes, and compares a resumed run with the run so far
folder_lock.py   locks it, so that two runs do not write into it
"""
