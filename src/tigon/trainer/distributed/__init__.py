"""Runs of several processes, signals, and fixes for DeepSpeed.

agreement.py            checks that the processes have one recipe, one data set and one run folder
launch.py               rank, world size, broadcast and all-gather; the process group
launcher_variables.py   the variables of launchers and of Accelerate that a run refuses or ignores
torchrun.py             starts the processes by PyTorch's launcher; the run folder that a restart continues
signals.py              SIGTERM and SIGINT end a run with a checkpoint
deepspeed_fixes.py      checkpoints without code, the dtype of partitions, a repeatable Adam on the CPU
extension_lock.py       the lock file of operators that DeepSpeed compiles
"""
