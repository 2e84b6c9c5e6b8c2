"""A reward for Python code that passes the tests of its row. It runs the code in a limited process.

The limits stop endless loops, large memory and large files. The code can still read files and use the network with the
rights of the run, so train in a container without secrets. They do not stop code that sets out to cheat: it runs in
the process that reports its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tigon.errors import RecipeError
from tigon.rewards.text import Completion, text_of

AT_ONCE = 4
"""Processes that run at the same time."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_STARTED = "started "
_CHILD = """
import json, os, resource, sys
def main():
    given = json.load(sys.stdin)
    code, tests, word = given["code"], given["tests"], given["word"].encode()
    limits = {"CPU": given["seconds"], "AS": given["memory_mib"] << 20, "FSIZE": 1 << 20, "CORE": 0, "NPROC": 64}
    for name, limit in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard < 0 else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    bytearray(1 << 20)
    answer, silent = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    del given
    os.write(answer, b"started ")
    names = {"__name__": "__main__"}
    exec(compile(code, "completion", "exec"), names)
    exec(compile(tests, "tests", "exec"), names)
    os.write(answer, word)
main()
"""
"""The program of the process. It writes `_STARTED`, and a random word if the code and then the tests ran to their end.

Exit code 0 would not do: code that ends the process with it would count as correct. Code that searches the frames of
the process for the word still can cheat.
"""


def passes_tests(
    completions: Sequence[Completion],
    tests: Sequence[str],
    *,
    allow: bool = False,
    seconds: int = 5,
    memory_mib: int = 1024,
    **columns: object,
) -> list[float]:
    """1 for each completion whose Python code runs and passes the tests of its row, otherwise 0.

    Args:
        completions: The completions. The last block between ``` marks is the code; without a block, the whole text.
            It can import Python's own modules only.
        tests: The column `tests` of the rows: Python that raises an exception if the code is wrong, such as `assert`.
        allow: Whether code that the model writes may run on this machine.
        seconds: Limit on the processor time of each process, in seconds. After twice as long it is ended.
        memory_mib: Limit on the address space of each process, in MiB.
        columns: The other columns, which are ignored.

    Raises:
        RecipeError: `allow` is not True, a limit is not a whole number of at least 1, or a process does not start.
    """
    if allow is not True:
        raise RecipeError(
            "it runs code that the model writes, which can read files and use the network; to allow it, set arguments: "
            "{allow: true} beside the function, and train in a container without secrets"
        )
    for name, limit in (("seconds", seconds), ("memory_mib", memory_mib)):
        if type(limit) is not int or limit < 1:
            raise RecipeError(f"{name} is {limit!r}; it must be a whole number of at least 1")
    texts = [text_of(completion) for completion in completions]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        passed = pool.map(lambda code, test: _passes(code, test, seconds, memory_mib), map(_code_in, texts), tests)
        return [float(each) for each in passed]


def _code_in(text: str) -> str:
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _passes(code: str, tests: str, seconds: int, memory_mib: int) -> bool:
    word = secrets.token_hex(16)
    given = {"code": code, "tests": tests, "word": word, "seconds": seconds, "memory_mib": memory_mib}
    is_late = False
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={},
            text=True,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(given), timeout=2 * seconds)
        except subprocess.TimeoutExpired:  # it sleeps, so that its limit on processor time does not end it
            is_late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the process, and those that it has started
            written, problem = process.communicate()
    if not written.startswith(_STARTED):
        why = f"not within {2 * seconds} s" if is_late else (problem.strip().splitlines() or ["no message"])[-1]
        raise RecipeError(
            f"passes_tests: the process for a completion's code did not start: {why}; raise seconds ({seconds}) or "
            f"memory_mib ({memory_mib})"
        )
    return not is_late and written == _STARTED + word
