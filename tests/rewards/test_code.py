"""Code that a model writes is run in a process with limits, and only if the caller allows it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tigon.errors import RecipeError
from tigon.rewards import passes_tests

TESTS = "assert double(4) == 8"
RIGHT = "def double(x):\n    return 2 * x\n"
REWARDS = {
    "right": (RIGHT, 1),
    "right in a block": (f"So:\n```python\n{RIGHT}```\nDone.", 1),
    "the last block counts": (f"```\n{RIGHT}```\n```py\ndouble = abs\n```", 0),
    "wrong": ("def double(x):\n    return x\n", 0),
    "no Python": ("two times x", 0),
    "exits with 0 before the tests": (f"{RIGHT}import os\nos._exit(0)", 0),
    "raises SystemExit": (f"{RIGHT}raise SystemExit(0)", 0),
    "prints": (f"print('x' * 100)\n{RIGHT}", 1),
    "endless": ("while True: pass", 0),
    "asleep": ("import time\ntime.sleep(60)", 0),
    "much memory": (f"{RIGHT}held = bytearray(1 << 30)", 0),
    "a large file": (f"{RIGHT}open('f', 'wb').write(bytes(1 << 22))", 0),
    "looks for the word in globals": (
        "import os, sys\nheld = sys._getframe(1).f_globals\nos.write(held['answer'], held['given']['word'].encode())",
        0,
    ),
    "no environment": (f"import os\nassert 'HOME' not in os.environ\n{RIGHT}", 1),
}


@pytest.mark.parametrize("case", REWARDS)
def test_reward_is_one_only_if_the_tests_ran_to_their_end(case) -> None:
    code, reward = REWARDS[case]
    started_s = time.monotonic()
    assert passes_tests([code], [TESTS], allow=True, seconds=1, memory_mib=512) == [reward]
    assert time.monotonic() - started_s < 30


def test_processes_that_the_code_leaves_are_ended(tmp_path) -> None:
    noted = tmp_path / "pid"
    code = f"{RIGHT}import os, time\nif not os.fork():\n    open({str(noted)!r}, 'w').write(str(os.getpid()))\n"
    code += f"    time.sleep(60)\nwhile not os.path.exists({str(noted)!r}) or not open({str(noted)!r}).read(): pass\n"
    passes_tests([code], [TESTS], allow=True, seconds=2)
    pid = int(noted.read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or " Z " in status.read_text():
            return
        time.sleep(0.05)
    pytest.fail("the process still runs")


def test_rewards_keep_the_order_of_the_completions() -> None:
    codes = [RIGHT if number % 2 else "x" for number in range(6)]
    assert passes_tests(codes, [TESTS] * 6, allow=True) == [0, 1, 0, 1, 0, 1]


def test_nothing_runs_unless_it_is_allowed(tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"use the network; to allow it, set arguments: \{allow: true\}"):
        passes_tests([f"open({str(tmp_path / 'ran')!r}, 'w')"], [TESTS])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("allow", ["false", "true", 1, None])
def test_only_true_allows_it(allow) -> None:
    with pytest.raises(RecipeError, match="to allow it"):
        passes_tests([], [], allow=allow)


@pytest.mark.parametrize("name", ["seconds", "memory_mib"])
@pytest.mark.parametrize("limit", [0.5, 512.0, 0, -1, True, "5"])
def test_limits_are_whole_numbers_of_at_least_one_even_without_completions(name, limit) -> None:
    with pytest.raises(RecipeError, match=f"{name} is {limit!r}; it must be a whole number of at least 1"):
        passes_tests([], [], allow=True, **{name: limit})


def test_process_that_does_not_start_is_an_error_and_no_reward() -> None:
    with pytest.raises(RecipeError, match=r"did not start: MemoryError; raise seconds \(5\) or memory_mib \(1\)"):
        passes_tests([RIGHT], [TESTS], allow=True, memory_mib=1)
