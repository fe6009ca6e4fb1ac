"""The help of the command line, and its words for verdicts: nothing here is fitted or sampled."""

import importlib.metadata
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import typer
from helpers.internals import EXAMPLES, at_least, at_most, print_tests
from typer.testing import CliRunner

from sdeinfer.cli import app


def test_what_there_is_is_shown_where_no_command_is_given():
    shown = CliRunner().invoke(app, env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert shown.stdout == CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    _, _, listed = shown.stdout.partition("Commands:\n")
    assert re.findall(r"^  (\w+) ", listed, re.MULTILINE) == list(EXAMPLES)
    assert "..." not in listed
    assert max(map(len, shown.stdout.splitlines())) < 80


def test_the_version_is_that_of_the_package():
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout.strip()) == (0, importlib.metadata.version("sdeinfer"))


@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_examples_of_the_help_are_commands_that_write_what_they_say(name):
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"})
    lines = shown.stdout.replace("\\\n", "").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  sdeinfer ")]
    said = [out for line in lines for out in re.findall(r"rites ([\w.]+)|then ([\w.]+/)", line)]
    said = [(first or second).strip("/") for first, second in said]
    assert len(commands) == len(said) > 0
    for (command, *arguments), out in zip(commands, said, strict=True):
        flags = typer.main.get_command(app).commands[command].make_context(command, arguments).params  # pyright: ignore
        assert str(flags.get("out")) == out.replace("nothing", "None"), (command, arguments)


def test_tests_are_printed_beside_their_thresholds(capsys):
    found = [
        at_most("converged", "a", 1, 2, ""),
        at_least("true", "b", np.nan, 2, "draw"),
        at_least("true", "c", 2, 2, ""),
    ]
    print_tests([*found, at_least("identified", "d", 1, 2, "more")])
    assert capsys.readouterr().out.splitlines() == [
        "  passed  a 1 < 2",
        "  FAILED  b nan ≠ 2: draw",
        "  passed  c 2 = 2",
        "  unsure  d 1 < 2: more",
    ]


def test_help_and_bad_flags_do_not_load_jax():
    script = """
import sys
from sdeinfer.cli import app
for arguments, code in [
    ([], 0),
    (["--help"], 0),
    (["calibrate", "--help"], 0),
    (["calibrate", "--width", "many"], 2),
    (["calibrate", "--architecture", "rnn"], 2),
    (["calibrate", "--data", "data.nc", "--gamma", "0.5"], 2),
    (["fit", "data.nc", "--no-such-flag"], 2),
    (["tune", "--help"], 0),
    (["recalibrate"], 2),
]:
    try:
        app(arguments)
    except SystemExit as end:
        assert end.code == code, (arguments, end.code)
    loaded = {"jax", "numpy", "pandas", "xarray", "matplotlib", "tqdm", "rich"} & set(sys.modules)
    assert not loaded, (arguments, loaded)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, capture_output=True, text=True)
    assert len(done.stderr.splitlines()) == 5
