"""Guards against faults that waste a run's hours or its result, and the choices of `auto`. One file per kind:

preflight.py           a run that cannot start or end: a missing package, no such device, a technique that it cannot
                       use, too many tokens for the model, too little memory or disk space. It refuses the run.
adapter_checks.py      adapters that do not fit the run's model. It refuses the run.
auto_checkpointing.py  replaces `train.checkpointing: auto` by the planner's choice for this machine.
auto_sequence.py       replaces `sharding.sequence_method: auto` by Ulysses or a ring, by the model's heads.
auto_packing.py        replaces `data.packing: null` by true or false: few rows would become too few samples.
document_mixing.py     a model that mixes the documents of a packed sample. It refuses the run before its first step.
recipe_warnings.py     allowed settings without an effect, such as a warm-up longer than the run. It warns.
self_test.py           a kernel that gives wrong results on this GPU. It leaves the op out of the patch, and warns.
prediction.py          a run that needs more memory than the GPU has. It warns before the run, and names what fits.
segments.py            PyTorch's expandable segments, which the plan counts with: it switches them on.
nan_guard.py           a loss or gradient that is not finite. It skips the step, so that no weight changes.
system_limits.py       the system's limits on open files, file size and memory. It raises the first, and
                       explains a run that reaches another.
console.py             a stdin, stdout or stderr that is closed or cannot be written. The run continues without it.
fault_messages.py      a fault without a way on, and a resumed run with other data, processes or precision. It says how
                       to continue, or refuses to.
"""
