"""Several processes, and DeepSpeed.

launch.py               who starts the processes, and which one this is
signals.py              SIGTERM and SIGINT end a run with a checkpoint
deepspeed_classes.py    DeepSpeed's classes that a checkpoint may hold, and the dtype of its partitions
deepspeed_adam.py       DeepSpeed's Adam on the host, made repeatable
extension_lock.py       the lock file of operators that DeepSpeed compiles
"""
