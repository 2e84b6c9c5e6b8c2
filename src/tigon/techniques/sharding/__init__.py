"""Several GPUs: the techniques (sharding.py), and DeepSpeed's configuration (deepspeed_config.py)."""
