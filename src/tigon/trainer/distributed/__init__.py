"""Runs of several processes, signals, and fixes for DeepSpeed.

launch.py               starts the processes; rank, world size, broadcast and all-gather
nodes.py                the machines of a run, from options or the variables of SLURM and Kubernetes
elastic_launcher.py     one machine's processes of a run on several, by PyTorch's elastic agent
node_watch.py           signs of life and failures that the launchers exchange
failures.py             which failure came first, and its message
launch_folder.py        the run folder that a restart continues, and the logs
signals.py              SIGTERM and SIGINT end a run with a checkpoint
deepspeed_classes.py    DeepSpeed's classes that a checkpoint may hold, and the dtype of its partitions
deepspeed_adam.py       makes DeepSpeed's Adam on the CPU repeatable
extension_lock.py       the lock file of operators that DeepSpeed compiles
"""
