"""The exceptions that tigon raises on purpose.

    TigonError
      x UsageError            a value that the op or command does not accept         (also a ValueError)
        + ShapeError          tensor shapes that do not match
        + DtypeError          a dtype for which the op has no defined result
        + OptionError         an option value, or a combination of options, that is not valid
        + ShardingError       a tensor divided among processes in a way that the op does not support
        + LabelError          a label outside [0, vocab) that is not ignore_index         (also an IndexError)
      x RecipeError           a recipe that cannot be run
        + DataError           a data file, named with its line
        + RunFolderError      a run folder or checkpoint that cannot be written or resumed
        + ProcessError        a process of a run has died
      x PatchError            a model that the patcher must not or cannot change
      x KernelError           a kernel that cannot run on this machine               (also a RuntimeError)
      x BenchError            a benchmark that cannot continue, or a file that is not a record
      x DoubleBackwardError   create_graph=True through an op without a second derivative  (also a RuntimeError)

Messages name the value, the limit and the next step, because the command line prints them alone.
"""

from __future__ import annotations


class TigonError(Exception):
    """Base class of every exception that tigon raises on purpose; `except TigonError` hides none of tigon's bugs."""


class UsageError(TigonError, ValueError):
    """The caller passed a value that the op or command does not accept."""


class ShapeError(UsageError):
    """Tensor shapes that do not match one another."""


class DtypeError(UsageError):
    """A dtype, or a mix of dtypes, for which the op has no defined result."""


class OptionError(UsageError):
    """An option value, or a combination of options, that is not valid."""


class ShardingError(UsageError):
    """A tensor divided among processes in a way that the op does not support, or an option that needs whole tensors."""


class LabelError(UsageError, IndexError):
    """A label outside [0, vocab) that is not `ignore_index`. Also an IndexError, as in PyTorch on the CPU."""


class RecipeError(TigonError):
    """A recipe that cannot be run as written."""


class DataError(RecipeError):
    """A data file that cannot be used; the message names file and line."""


class RunFolderError(RecipeError):
    """A run folder or checkpoint that cannot be written to or resumed from."""


class ProcessError(RecipeError):
    """A process of a run has died: one of several ranks, or a process that prepares batches."""


class PatchError(TigonError):
    """A model that the patcher must not or cannot change. The model is unchanged when this is raised."""


class KernelError(TigonError, RuntimeError):
    """A kernel that cannot run on this machine, or gives wrong results on it."""


class BenchError(TigonError):
    """A benchmark that cannot continue, or a record that cannot be read or written."""


class DoubleBackwardError(TigonError, RuntimeError):
    """`create_graph=True` through an op whose backward cannot be differentiated again."""


def one_line(error: BaseException) -> str:
    """The type of an error and the first 200 characters of its message, without line breaks."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
