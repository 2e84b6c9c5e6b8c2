"""Predicts the memory and time of a training run without a GPU.

request.py            the input: a model, a batch and the run's techniques
gpus.py               GPUs as data
estimate.py           the pipeline, and its result
simulated_run.py      memory of a run over three steps
step_time.py          seconds of a step
model_plan.py         `tigon.plan`, for a model in your own code
model_checkpoint.py   `tigon.checkpoint`, which applies its choice
collector.py          no garbage collections while a plan is made

trace/             one micro-batch of the real model code on fake tensors
simulate/          memory by component, the caching allocator, the roofline
engines/           what one rank holds under DDP, ZeRO and FSDP2
search/            which recipes fit
render/            the result as text, JSON, charts or a recipe
"""
