"""Parts of the simulation.

model_states.py  weights, gradients, optimizer states
ledger.py        memory by component and phase
allocator.py     PyTorch's caching allocator
playback.py      plays a tape into a ledger
generation.py    completions that a run writes itself
collectives.py   gathered weights and reduced gradients
roofline.py      seconds of a micro-batch and of an update
optimizer_cost.py  memory and traffic of each optimizer
"""
