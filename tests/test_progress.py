"""The current phase: on one line of a terminal, cleared at the end; nowhere else."""

import inspect
import io
import sys
import time

import pytest
from helpers.internals import ProgressBar, done, phase, progress_line, with_progress_line

import sdeinfer as si


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def line(self) -> str:
        """What the terminal shows at last."""
        shown = ""
        for text in self.getvalue().split("\r"):
            shown = text + shown[len(text) :]
        return shown.strip()


def on_terminal(monkeypatch) -> Terminal:
    """Called by the tests themselves: pytest sets standard error anew after the fixtures."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_phases_replace_each_other_say_how_far_they_are_and_are_cleared(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with progress_line(show=True):
        phase("compiling the sampler")
        assert terminal.line() == "compiling the sampler …"
        with progress_line(show=True):
            phase("preparing the data")
        done(0.3)
        done(0.6)
        assert terminal.line() == "preparing the data … 60%"
        phase("predicting")
        assert terminal.line() == "predicting …"
    assert terminal.line() == ""
    assert "\n" not in terminal.getvalue()
    before = terminal.getvalue()
    phase("without a line")
    assert terminal.getvalue() == before


def test_a_bar_takes_the_place_of_the_phase(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with progress_line(show=True):
        phase("a very long name of a phase " * 4)
        with ProgressBar(total=4, desc="sampling", show=True, ncols=40) as bar:
            bar.start_t, bar.last_print_t = bar.start_t - 3, bar.last_print_t - 3  # as if three seconds ago
            bar.update(2)
            assert terminal.line().startswith("sampling:  50%")
            assert "name" not in terminal.line()


@with_progress_line
def slow(seconds, *, progress=True):
    del progress
    phase("solving")
    time.sleep(seconds)
    return sys.stderr.line()


def test_functions_say_what_they_do_after_two_seconds_unless_told_not_to(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr("sdeinfer._progress.DELAY", 0.2)
    assert slow(0.0) == ""
    assert slow(1.0, progress=False) == ""
    assert terminal.getvalue() == ""
    assert slow(1.0) == "solving …"
    assert terminal.line() == ""


@pytest.mark.parametrize(
    "function",
    [
        *(si.fit, si.check, si.sample_networks, si.simulate, si.simulate_stopped, si.tangents, si.tune, si.transfer),
        *(si.audit, si.observe, si.observe_branches),
    ],
)
def test_what_takes_long_has_progress_by_default(function):
    assert inspect.signature(function).parameters["progress"].default is True


def test_nothing_is_shown_in_a_pipe_or_unasked(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with progress_line(show=False):
        phase("compiling")
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # imported, as by what starts a kernel
    with progress_line(show=True):
        phase("compiling")
        with ProgressBar(total=4, desc="sampling", show=True) as bar:
            bar.update(2)
    assert terminal.getvalue() == ""
