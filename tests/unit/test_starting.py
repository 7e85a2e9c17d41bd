"""How a command ends: all that waits for its end is done, and nothing is taken apart."""

import subprocess
import sys

import pytest

COMMAND = """
import atexit, sys
from specmm.cli.starting import quick_end

class Apart:
    def __del__(self):
        print("taken apart")

kept = Apart()
with quick_end():
    atexit.register(print, "at the end")
    print("done")
    {last}
"""


@pytest.mark.parametrize(
    "last, code, said, error",
    [
        ("sys.exit(3)", 3, "done\nat the end\n", ""),
        ("sys.exit(0)", 0, "done\nat the end\n", ""),
        ("sys.exit('no')", 1, "done\nat the end\ntaken apart\n", "no"),
        ("raise KeyError('a')", 1, "done\nat the end\ntaken apart\n", "KeyError: 'a'"),
    ],
)
def test_a_command_ends_at_once(last, code, said, error):
    command = [sys.executable, "-c", COMMAND.replace("{last}", last)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, said) and error in done.stderr


def test_a_command_without_an_output_ends_without_a_word():
    command = [sys.executable, "-c", COMMAND.replace("{last}", "sys.exit(3)")]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
