"""The program `tigon`: combines its commands, and prints errors that the user can fix as one line on stderr."""

# No `from __future__ import annotations`: typer reads the annotations of functions made inside `_app`.
import errno
import sys
from typing import Annotated, Any

from tigon import __version__
from tigon.errors import TigonError
from tigon.trainer.guards import console, system_limits

USAGE_EXIT, INTERRUPTED_EXIT, BROKEN_PIPE_EXIT = 2, 130, 141  # shells use the last two for SIGINT and SIGPIPE
# Errors of a path that the user gave, in whichever call first uses the path.
_PATH_ERRORS = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)


def main() -> None:
    """Entry point of `tigon` and `python -m tigon`. An error that the user can fix is one line on stderr and code 2."""
    console.open_closed_streams()
    try:
        import typer
    except ModuleNotFoundError:
        _fail("the command line needs typer, which is not installed; run pip install 'tigon[train]'")
    try:
        sys.exit(_app()(standalone_mode=False) or 0)
    except TigonError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED_EXIT)
    except BrokenPipeError:  # `tigon plan ... | head`: the reader has closed the pipe
        with console.survive_broken_streams():  # at exit Python would flush its buffer and fail again
            sys.stdout.flush()
        sys.exit(BROKEN_PIPE_EXIT)
    except OSError as error:
        if error.errno not in _PATH_ERRORS or error.filename is None:
            _fail_at_a_limit(error)
        _fail(f"{error.filename}: {error.strerror}; give another path, or fix this one")
    except Exception as error:
        _fail_as_typed(error)


def _fail(message: str) -> None:
    with console.survive_broken_streams():
        print(f"tigon: {message}", file=sys.stderr)
    sys.exit(USAGE_EXIT)


def _fail_at_a_limit(error: Exception) -> None:
    """Print one line if the error comes from a system limit on processes. Any other error is a bug and is raised."""
    message = system_limits.words(error)
    if message is None:
        raise error
    _fail(message)


def _fail_as_typed(error: Any) -> None:
    """Print one line for a wrong flag or value. typer raises errors of click, or of the copy of click it ships."""
    if not hasattr(error, "format_message"):
        _fail_at_a_limit(error)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(USAGE_EXIT)
    typed = error.ctx.command_path if getattr(error, "ctx", None) else "tigon"
    _fail(f"{' '.join(error.format_message().split()).rstrip('.')}; {typed} --help lists the options.")


def _app() -> Any:
    import typer

    from tigon.cli import bench, doctor, medusa, models, plan, profile, sweep, train  # loads typer

    app = typer.Typer(
        help="Train larger batches and longer contexts of Hugging Face language models.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    def show_version(asked: bool) -> None:
        if asked:
            print(f"tigon {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Train larger batches and longer contexts of Hugging Face language models."""

    app.command("train")(train.command)
    app.command("medusa")(medusa.command)
    app.command("plan")(plan.command)
    app.command("sweep")(sweep.command)
    app.command("profile")(profile.command)
    app.command("models")(models.command)
    app.command("doctor")(doctor.command)
    kernels = typer.Typer(
        help="Measure kernels against other libraries and the hardware's limit.", no_args_is_help=True
    )
    kernels.command("kernels")(bench.kernels_command)
    kernels.command("report")(bench.report_command)
    app.add_typer(kernels, name="bench")
    return app
