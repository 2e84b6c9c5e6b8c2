"""Runs of several processes, signals, and fixes for DeepSpeed.

launch.py               rank, world size, broadcast and all-gather; the process group
launcher_variables.py   the variables of launchers and of Accelerate that a run refuses or ignores
torchrun.py             starts the processes by PyTorch's launcher; the run folder that a restart continues
signals.py              SIGTERM and SIGINT end a run with a checkpoint
deepspeed_classes.py    DeepSpeed's classes that a checkpoint may hold, and the dtype of its partitions
deepspeed_adam.py       makes DeepSpeed's Adam on the CPU repeatable
extension_lock.py       the lock file of operators that DeepSpeed compiles
"""
