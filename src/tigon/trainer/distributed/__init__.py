"""Runs of several processes, signals, and fixes for DeepSpeed.

launch.py               starts the processes; rank, world size, broadcast and all-gather
signals.py              SIGTERM and SIGINT end a run with a checkpoint
deepspeed_classes.py    DeepSpeed's classes that a checkpoint may hold, and the dtype of its partitions
deepspeed_adam.py       makes DeepSpeed's Adam on the CPU repeatable
extension_lock.py       the lock file of operators that DeepSpeed compiles
"""
