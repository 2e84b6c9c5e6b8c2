"""The command line: flags to recipe, no logic. What is heavy is imported inside the commands, so `--help` is quick."""

# No `from __future__ import annotations`: typer reads the annotations of functions made inside `_app`.
import sys
from pathlib import Path
from typing import Annotated, Any

from tigon.errors import TigonError

USAGE_EXIT, INTERRUPTED_EXIT = 2, 130


def main() -> None:
    """Entry point of `tigon` and `python -m tigon`: what the user can act on is one line on stderr and exit code 2."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        _fail("the command line needs typer, not installed here: pip install 'tigon[train]'")
    try:
        _app()()
    except TigonError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT)


def _fail(message: str) -> None:
    print(f"tigon: {message}", file=sys.stderr)
    sys.exit(USAGE_EXIT)


def _app() -> Any:
    import typer

    app = typer.Typer(
        help="Train larger batches and longer contexts of Hugging Face language models.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    def show_version(asked: bool) -> None:
        if asked:
            from tigon import __version__

            print(f"tigon {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Train larger batches and longer contexts of Hugging Face language models."""

    @app.command("train")
    def train_command(
        recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="YAML; docs/train.md lists its keys.")],
        assignments: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Change a recipe key, e.g. --set train.batch_size=8."),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    ) -> None:
        """Train a model as a recipe says, with a report at the end."""
        from tigon.train.run import train

        train(recipe, assignments or (), resume=resume)

    return app
