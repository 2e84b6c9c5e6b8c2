"""DeepSpeed's own classes as a run needs them."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_technique_runs import need

from tigon.trainer.distributed.deepspeed_fixes import keep_partition_dtype

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("dtype", "fp16_supported"), list(itertools.product(DTYPES, [True, False])))
def test_partitions_have_the_dtype_asked_for_on_every_cpu(dtype, fp16_supported, monkeypatch):
    need("deepspeed")
    from deepspeed.runtime.zero import partition_parameters

    accelerator = partition_parameters.get_accelerator()
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda: fp16_supported)
    monkeypatch.setattr(partition_parameters.Init, "_set_dtype", partition_parameters.Init._set_dtype)  # put back after
    for _ in range(2):  # each run in a process asks again
        keep_partition_dtype()
    context = partition_parameters.Init.__new__(partition_parameters.Init)
    context._set_dtype(None, dtype)
    assert context.dtype == dtype
