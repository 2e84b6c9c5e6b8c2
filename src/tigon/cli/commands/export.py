"""`tigon export`: write a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tigon._quiet import quiet_loading, quiet_packages
from tigon.cli.options import Trained, TrustRemoteCode
from tigon.cli.shared import Command
from tigon.models.loading.hub import set_offline_mode
from tigon.units import in_bytes


def command(
    name: Trained,
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="The new folder.")],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights: bf16, fp16 or fp32. Default: that of the run.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the adapters to the weights. Default: export the adapters alone.")
    ] = False,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="Also write a GGUF file (f32, f16, bf16, q8_0, q4_k_m, q4_0, auto) and a Modelfile."
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Weights in 8 or 4 bits for vLLM and transformers: fp8, int4 or mxfp4."),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Read the files back and compare them with the trained model. Default: unless adapters are copied.",
        ),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Then upload the folder to the hub, after a question.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A new hub repository is public.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload without the question.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a trained model to a new folder: in another dtype or format, merged, as GGUF, and to the hub on request."""
    quiet_packages()
    from tigon.trained import export, find  # not for --help

    trained = find.find(name, trust_remote_code=trust_remote_code)
    kind = None if gguf is None else gguf.lower()  # llama.cpp writes Q4_K_M
    wanted = export.Export(target=target, dtype=dtype, merge=merge, gguf=kind, format=format, verify=verify)
    wanted.check(trained)
    if push is not None:
        export.check_repository(push)
    set_offline_mode([trained.weights, trained.tokenizer, *([push] if push else [])])
    quiet_loading()
    written = export.export(trained, wanted)
    for path in written.files:
        print(f"{path}  {in_bytes(path.stat().st_size)}")
    for line in written.lines:
        print(line)
    if push is not None:
        kind = "public" if public else "private"
        question = f"Upload {target} to {push} on the hub? A new repository will be {kind}."
        if yes or typer.confirm(question):
            print(export.push(target, push, private=not public))


COMMAND = Command(command, place=3)
