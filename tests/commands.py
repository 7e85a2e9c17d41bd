"""``specmm`` on a command line, in this process; the first text may be several words."""

import json
import shlex

from typer.testing import CliRunner

from specmm.cli import app


def run(command, *words, **given):
    return CliRunner().invoke(app, [*shlex.split(str(command)), *map(str, words)], **given)


def succeed(*words, **given):
    done = run(*words, **given)
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def as_json(*words):
    """What a command says with ``--json``."""
    said = succeed(*words, "--json").stdout
    assert said.count("\n") == 1
    return json.loads(said)


def refused(*words):
    """The one line of a command that must fail as a user's mistake."""
    done = run(*words)
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr
