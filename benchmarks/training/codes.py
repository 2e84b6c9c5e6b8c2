"""TRL's head, and tigon with CUDA graphs, fused gradient accumulation and FP8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tigon.bench.training.variants import CODES, DEFAULT, Code, Ready, by_forward, patched
from tigon.models.fp8 import patch_fp8
from tigon.models.patch import patch
from tigon.ops.accumulation_fusion import accumulation_fusion
from tigon.ops.linear.fp8 import SCALINGS
from tigon.techniques.accumulation.fused_embedding import fuse_embeddings
from tigon.techniques.accumulation.fused_linear import fuse_linears
from tigon.techniques.cuda_graphs import cuda_graphs
from tigon.techniques.cuda_graphs.layer_graphs import LayerGraphs


def _trl(model: Any) -> Ready:
    import trl
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        raise NotImplementedError(f"TRL {trl.__version__} has no add_fused_lm_head; 1.16 has it")
    # What SFTTrainer asks for: the last two feed its metrics.
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return Ready(
        lambda ids, learned: model(input_ids=ids, labels=ids, num_items_in_batch=learned, fused_lm_head=True).loss
    )


def _tigon_fp8(scaling: str) -> Callable[[Any], Ready]:
    def prepare(model: Any) -> Ready:
        patch(model)
        patch_fp8(model, scaling=scaling)
        return Ready(by_forward(model))

    return prepare


def _graphs_of(model: Any, recomputed: str) -> LayerGraphs:
    if next(model.parameters()).device.type != "cuda":
        raise NotImplementedError("CUDA graphs need a GPU")
    return cuda_graphs.graph(model, recomputes=recomputed == "full")


def _in_graphs(model: Any, ready: Ready, recomputed: str) -> Ready:
    graphs = _graphs_of(model, recomputed)

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        try:
            yield
        finally:
            graphs.release()  # their memory would count in the turns of the other variants

    return Ready(ready.loss, active)


def _fused(model: Any, ready: Ready, recomputed: str) -> Ready:
    fuse_linears(model)
    fuse_embeddings(model)
    return Ready(ready.loss, accumulation_fusion)


def _in_fused_graphs(model: Any, ready: Ready, recomputed: str) -> Ready:
    ready = _in_graphs(model, _fused(model, ready, recomputed), recomputed)

    @contextlib.contextmanager
    def active() -> Iterator[None]:
        with accumulation_fusion(), ready.active():
            yield

    return Ready(ready.loss, active)


def _tigon(name: str, meaning: str, settings: Mapping[str, Any], **fields: Any) -> Code:
    fields = {"prepare": patched, **fields}
    return Code(name=name, meaning=meaning, kernels="tigon", ours=True, settings=settings, **fields)


_GRAPHS, _FUSED = {"train.cuda_graphs": True}, {"train.gradient_accumulation_fusion": True}


def _fp8_settings(scaling: str) -> dict[str, Any]:
    return {"train.precision": "fp8", "train.fp8_scaling": scaling}


_MORE = (
    _tigon("tigon-graphs", "`tigon` with `train.cuda_graphs`", _GRAPHS, finish=_in_graphs),
    _tigon(
        "tigon-graphs-fused",
        "`tigon-graphs` with `train.gradient_accumulation_fusion`",
        {**_GRAPHS, **_FUSED},
        finish=_in_fused_graphs,
    ),
    _tigon("tigon-fused", "`tigon` with `train.gradient_accumulation_fusion`", _FUSED, finish=_fused),
    *(
        _tigon(
            f"tigon-fp8-{scaling}",
            f"`tigon` with `train.precision: fp8` and {scaling} scaling",
            _fp8_settings(scaling),
            prepare=_tigon_fp8(scaling),
        )
        for scaling in SCALINGS
    ),
    _tigon(
        "tigon-fp8-graphs",
        f"`tigon-fp8-{SCALINGS[0]}` with `train.cuda_graphs`",
        {**_fp8_settings(SCALINGS[0]), **_GRAPHS},
        prepare=_tigon_fp8(SCALINGS[0]),
        finish=_in_graphs,
    ),
)
_TRL = Code(
    name="trl", meaning="transformers with the head that TRL's SFTTrainer adds (`add_fused_lm_head`)", prepare=_trl
)
ALL: Mapping[str, Code] = {
    **{name: code for name, code in CODES.items() if name != "tigon"},
    "trl": _TRL,
    "tigon": CODES["tigon"],
    **{code.name: code for code in _MORE},
}
USUAL = (*DEFAULT[:4], "trl:full", *DEFAULT[4:])
"""The variants that are measured if none is named."""
# A code that records name and that no longer exists -> its meaning.
RETIRED: Mapping[str, str] = {
    "tigon-graphs-fused-add": "`tigon-graphs-fused` with decoder layers whose residual addition and norm were one op, "
    "an option of `tigon.patch` that was removed because it is not faster",
}
