"""What `tigon plan --nodes` is asked: a workload and a cluster from the flags, and the printed plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tigon.cli.plan_request import (
    CAUSAL_LM,
    DEFAULT_BATCH,
    DEFAULT_SEQ,
    Flags,
    check_flags,
    check_fp8,
    config_of,
    host_bytes_of,
)
from tigon.cli.shared import stdout_console
from tigon.errors import UsageError
from tigon.planner.cluster.compute import FUSED, UNFUSED, Workload
from tigon.planner.cluster.search import ClusterPlan, plan_cluster
from tigon.planner.cluster.shape import shape_of
from tigon.planner.cluster.topology import MOST_GPUS, Cluster, link_bytes_s
from tigon.planner.render import cluster as render
from tigon.planner.request import Request, check
from tigon.techniques.records.choices import Choices

DEFAULT_GPU = "h100"
"""The GPU of a cluster plan without --gpu."""
TAKEN = ("gpus", "precision", "optimizer", "kernels")
"""The fields of Choices that a cluster plan takes."""
WORDS: Mapping[str, tuple[str, ...]] = {
    "precision": ("amp-bf16", "bf16", "fp8"), "optimizer": ("adamw",), "kernels": ("tigon", "none"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The flags of a cluster plan, beside those of a plan of one node."""

    flags: Flags
    nodes: int | None
    link: str | None
    unused: Mapping[str, bool]
    """Flags that only a plan of one node takes -> whether they were given."""


def run(asked: ClusterFlags, *, as_json: bool) -> None:
    """Plan and print.

    Raises:
        UsageError: A flag has a value out of range, or is only for a plan of one node.
    """
    plan = answer(asked)
    if as_json:
        print(json.dumps(render.as_mapping(plan), indent=2))
    else:
        render.show(plan, stdout_console())


def answer(asked: ClusterFlags) -> ClusterPlan:
    """The plan that the flags ask for. Raises UsageError as `run` does."""
    flags = asked.flags
    _check(asked)
    cluster = _cluster(asked)
    given = flags.given
    precision = str(given.get("precision", "amp-bf16"))
    seq = DEFAULT_SEQ if flags.seq is None else flags.seq
    request = Request(
        model=flags.target, config=config_of(flags.target), batch=1, seq=seq, choices=Choices(precision="bf16"),
        masked=False,
    )  # fmt: skip
    check(request)
    samples = flags.effective_batch or (DEFAULT_BATCH if flags.batch is None else flags.batch) * cluster.gpus
    fused = given.get("kernels", "tigon") == "tigon"
    work = Workload(
        shape=shape_of(request), seq=seq, samples=samples, states="amp-bf16" if precision == "amp-bf16" else "bf16",
        fp8=precision == "fp8", kernels=FUSED if fused else UNFUSED, fused_loss=fused,
    )  # fmt: skip
    return plan_cluster(work, cluster, host_bytes=host_bytes_of(flags.host_memory))


def _cluster(asked: ClusterFlags) -> Cluster:
    gpus, nodes = asked.flags.given.get("gpus"), asked.nodes
    assert nodes is not None
    if gpus is None:
        raise UsageError(f"--nodes {nodes} requires --gpus, the GPUs of each node; add --gpus 8.")
    if nodes > 1 and asked.link is None:
        raise UsageError(
            f"--nodes {nodes} requires --link, each GPU's rate to other nodes; add --link 400Gb for one link of "
            "400 Gb/s per GPU."
        )
    return Cluster(
        gpu=asked.flags.gpu, gpus_per_node=gpus, nodes=nodes,
        link_bytes_s=link_bytes_s(asked.link) if asked.link is not None else 0.0,
    )  # fmt: skip


def _check(asked: ClusterFlags) -> None:
    """Refuse what a cluster plan does not take."""
    flags, nodes = asked.flags, asked.nodes
    if nodes is None:
        raise UsageError(f"--link {asked.link} requires --nodes; add --nodes 2 or more, or leave --link out.")
    if nodes < 1:
        raise UsageError(f"--nodes is {nodes}; it must be at least 1.")
    check_flags(flags)
    if nodes * int(flags.given.get("gpus", 1)) > MOST_GPUS:
        raise UsageError(f"--nodes is {nodes}; a cluster plan has at most {MOST_GPUS} GPUs.")
    if flags.is_recipe:
        raise UsageError(f"--nodes {nodes} plans a model, and {flags.target} is a recipe; give the model's name.")
    if flags.objective != CAUSAL_LM or flags.medusa is not None:
        raise UsageError(f"--nodes {nodes} plans training on text; leave --objective and --medusa out.")
    if flags.method not in ("auto", "full"):
        raise UsageError(f"--nodes {nodes} plans full fine-tuning; leave --method {flags.method} out.")
    for name, was_given in asked.unused.items():
        if was_given:
            raise UsageError(f"--{name} is for a plan of one node; leave it or --nodes out.")
    _check_settings(flags.given)
    check_fp8(flags.gpu, flags.given.get("precision"))
    if not flags.gpu.has_bf16:
        raise UsageError(f"{flags.gpu} has no bf16, which cluster plans assume; plan one node without --nodes.")


def _check_settings(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in TAKEN:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} is for a plan of one node, and --nodes compares divisions itself; leave one out."
            )
        if name in WORDS and value not in WORDS[name]:
            raise UsageError(f"--{name} is {value!r}; with --nodes choose one of {', '.join(WORDS[name])}.")
