"""`tigon chat`: talk with a trained model."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Annotated

import typer

from tigon._quiet import quiet_loading, quiet_packages
from tigon.cli.options import Trained, TrustRemoteCode
from tigon.cli.shared import Command
from tigon.errors import UsageError
from tigon.models.loading.hub import set_offline_mode


def command(
    name: Trained,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this text alone, then exit.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Higher is more varied; 0 takes the likeliest token. Default: 0.7, with heads 0."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes the GPU if there is one.")] = "auto",
    generator: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What writes the answers: tigon's generator, transformers, or auto: tigon's on a GPU if it knows the "
            "model.",
        ),
    ] = "auto",
    no_heads: Annotated[bool, typer.Option("--no-heads", help="Leave out heads that predict several tokens.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk with a trained model: its adapters and heads are loaded, and answers appear while they are generated."""
    quiet_packages()
    from tigon.trained import chat, find, load  # not for --help

    trained = find.find(name, trust_remote_code=trust_remote_code)
    if no_heads:
        trained = dataclasses.replace(trained, heads=None)
    set_offline_mode([trained.weights, trained.tokenizer])
    quiet_loading()
    if load.writes_no_text(trained):
        raise UsageError(
            f"{name} gives labels or scores and writes no text; use transformers' pipeline('text-classification')"
        )
    if isinstance(sys.stdout, io.TextIOWrapper):  # an answer may have characters that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    loaded = load.load(trained, device=load.device_of(device))
    default = 0.0 if loaded.has_heads else chat.DEFAULT_TEMPERATURE
    conversation = chat.Conversation(
        loaded,
        max_tokens=max_tokens,
        temperature=default if temperature is None else temperature,
        system=system,
        generator=generator,
    )
    if conversation.answers.note is not None:
        print(f"note     {conversation.answers.note}", file=sys.stderr, flush=True)
    if prompt is None:
        chat.talk(conversation)
    else:
        chat.answer(conversation, prompt)


COMMAND = Command(command, place=3)
