"""Plans for clusters by arithmetic: memory, traffic and step time of each division of a model over many GPUs.

topology.py    the GPUs, the links between them, and the time of a collective
shape.py       a dense model as the numbers that the arithmetic needs
division.py    how a run is divided, and which divisions tigon trains
compute.py     the time of a layer's products and other operators
memory.py      bytes per GPU and per host
traffic.py     what each collective moves in a step
step.py        the time of a step, with collectives beside the computation
search.py      every division of a request, the fastest that fits first
"""
