"""Functions and classes of the user that a recipe names as `module:name`: rewards, tools, environments."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tigon.errors import RecipeError, one_line


def load_object(key: str, name: str, *, form: str = "module:function", example: str) -> Callable[..., Any]:
    """The function or class of `module:name`. The module may be a file in the current folder.

    Args:
        key: The recipe key that names it, for messages.
        name: Its name in the recipe.
        form: How a name is written, for messages.
        example: A valid name, for messages.

    Raises:
        RecipeError: The name has another form, or the module or the object does not exist.
    """
    where, separator, attribute = name.partition(":")
    if not (separator and where and attribute.isidentifier()):
        raise RecipeError(f"{key}: {name!r} is not {form}, e.g. {example}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise RecipeError(f"{key}: {name}: the module cannot be imported: {one_line(error)}") from error
    found: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(found):
        file = getattr(module, "__file__", None) or where
        raise RecipeError(f"{key}: {name}: {file} has no {form.partition(':')[2].lower()} {attribute}")
    return found


def place_of(error: BaseException) -> str:
    """Where the user's function failed, as the end of a sentence."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first frame is tigon's
    return f", in line {frames[0].lineno} of {frames[0].filename}" if frames else ""
