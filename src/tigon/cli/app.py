"""The program `tigon`: combines its commands, and prints errors that the user can fix as one line on stderr."""

# No `from __future__ import annotations`: typer reads the annotations of functions made inside `_app`.
import errno
import importlib
import pkgutil
import sys
from typing import Annotated, Any, NoReturn

from tigon import __version__
from tigon._install import install_command
from tigon.cli import commands
from tigon.cli.shared import Command
from tigon.errors import TigonError
from tigon.trainer.guards import console, system_limits

USAGE_EXIT, INTERRUPTED_EXIT, BROKEN_PIPE_EXIT = 2, 130, 141  # shells use 130 for SIGINT and 141 for SIGPIPE
# In a run of several processes, those other than rank 0 end with 2 and no message (trainer/prepare.py, engine.py).
# Errors that a path given by the user can cause, in any call that uses the path.
_PATH_ERRORS = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)


def main() -> None:
    """Entry point of `tigon` and `python -m tigon`. An error that the user can fix is one line on stderr and code 2."""
    console.open_closed_streams()
    try:
        import typer
    except ModuleNotFoundError:
        _answer_without_typer(sys.argv[1:])
    try:
        code = _run(_app())
        sys.stdout.flush()  # a short output is written only now, to a reader that may have gone
        sys.exit(code)
    except TigonError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED_EXIT)
    except BrokenPipeError:  # `tigon plan ... | head`: the reader has closed the pipe
        with console.survive_broken_streams():  # at exit Python would flush its buffer and fail again
            sys.stdout.flush()
        sys.exit(BROKEN_PIPE_EXIT)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:  # writes do not name their file
            console.drop(1)
            _fail(f"{error.strerror}: stdout, or a file of this command, could not be written; free some space")
        if error.errno not in _PATH_ERRORS or error.filename is None:
            _fail_at_a_limit(error)
        _fail(f"{error.filename}: {error.strerror}; give another path, or fix this one")
    except Exception as error:
        _fail_as_typed(error)


def _run(app: Any) -> int:
    """Run the command of `sys.argv`. Returns the exit code.

    An app that is called, as typer's documentation has it, ends with code 1 itself when the reader of its output exits.
    """
    import typer

    command = typer.main.get_command(app) if isinstance(app, typer.Typer) else app
    try:
        with command.make_context("tigon", sys.argv[1:]) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return int(stop.exit_code)
    return 0


def _answer_without_typer(arguments: list[str]) -> NoReturn:
    if arguments == ["--version"]:
        print(f"tigon {__version__}")
        sys.exit(0)
    _fail(f"the command line needs typer, which is not installed; run {install_command('train')}")


def _fail(message: str) -> NoReturn:
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


def _commands() -> dict[str, Command]:
    """The commands that the files of `commands` declare, in the order of the help."""
    names = [info.name for info in pkgutil.iter_modules(commands.__path__)]
    declared = {name: importlib.import_module(f"{commands.__name__}.{name}").COMMAND for name in names}
    return dict(sorted(declared.items(), key=lambda item: (item[1].place, item[0])))


def _app() -> Any:
    import typer

    app = typer.Typer(
        help="Train larger batches and longer contexts of Hugging Face language models.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    def show_version(requested: bool) -> None:
        if requested:
            print(f"tigon {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Train larger batches and longer contexts of Hugging Face language models."""

    for name, command in _commands().items():
        if isinstance(command.run, typer.Typer):
            app.add_typer(command.run, name=name)
        else:
            app.command(name)(command.run)
    return app
