"""The application: its help, how commands start, and how they end on unusable input."""

import importlib.metadata
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sdeinfer._files import InputError, first_line

WELCOME = """\
Check how your network is initialised; infer the parameters of shaped
Transformers from hidden states, with error bars and a verdict.

\b
# See it work: sample 128 networks, fit and judge them. Half a minute.
# Writes calibration/: report.html, figures/, data.nc, posterior.nc, …
sdeinfer calibrate

\b
# Is the model of this config.json initialised as GPT-2 is? Half a minute.
# Writes audit/: audit.html, audit.json
sdeinfer audit config.json --recipe gpt2 --out audit

\b
# Fit hidden states of yours, (networks, layers, tokens, width). A minute.
# Writes data.nc, then calibration/ as above
sdeinfer observe --hidden-states states.npy --architecture transformer
sdeinfer calibrate --data data.nc
"""

EXAMPLES = {
    "calibrate": """\
# data of your own; writes mine/: report.html, figures/, posterior.nc, …
sdeinfer calibrate --data data.nc --architecture transformer --out mine""",
    "audit": """\
# a Hugging Face model; writes audit/: audit.html, audit.json
sdeinfer audit config.json --recipe gpt2 --out audit
# the model that the function `make` in model.py makes; writes nothing
sdeinfer audit model.py:make --recipe pytorch""",
    "tune": """\
# the largest γ at a stated risk; writes tuned/: report.html, tuned.json, …
sdeinfer tune --maximise gamma --fix tau0=1 --fix c_gap=1 --norm 1 \\
  --subject-to 'P(norm factor < 2) >= 0.95'""",
    "observe": """\
# hidden states of your own; writes data.nc
sdeinfer observe --hidden-states states.npy --architecture transformer
# sampled networks, every fourth layer; writes sampled.nc
sdeinfer observe --gamma 0.3 --observe-every 4 --out sampled.nc""",
    "fit": """\
# γ and c± where τ0 is known; writes posterior.nc, for `check` and `report`
sdeinfer fit data.nc --architecture transformer --fix tau0=1""",
    "check": "# parameters and verdict of what `fit` wrote; writes nothing\nsdeinfer check posterior.nc",
    "report": "# of what `fit` wrote; writes report/: report.html, …\nsdeinfer report posterior.nc",
    "simulate": "# paths up to depth-time 0.25; writes paths.nc\nsdeinfer simulate --time 0.25 --gamma 0.3",
}
"""Commands to copy, with comments that say what they do and what they write; tests parse them."""

UsageError: Any = typer.BadParameter.__base__


class OneLineErrors(TyperGroup):
    """Commands that end on unusable input with one line on standard error and exit code 2; without a command, help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help if there is nothing to parse."""
        return super().parse_args(ctx, args or ["--help"])

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:  # noqa: FBT001, FBT002
        """Run a command."""
        del standalone_mode
        try:
            code = super().main(*args, standalone_mode=False, **extra)
            sys.exit(code if isinstance(code, int) else 0)
        except UsageError as error:
            message = error.format_message()
        except InputError as error:
            message = error
        except Exception as error:
            if not _out_of_memory(error):
                raise
            message = f"not enough memory ({first_line(error)})"
        typer.echo(f"sdeinfer: {message}", err=True)
        sys.exit(2)


def _out_of_memory(error: Exception) -> bool:
    """Whether Python or XLA ran out of memory; XLA's error is matched by name, because JAX may not be loaded."""
    from_xla = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    return from_xla or isinstance(error, MemoryError)


class Command(TyperCommand):
    """A command that loads JAX after it has parsed its flags, so that help and flag errors do not wait for JAX."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples after the flags."""
        del ctx
        with formatter.section("Examples"):
            formatter.write_text(f"\b\n{EXAMPLES[self.name or '']}")

    def invoke(self, ctx: Any) -> Any:
        """Run the command in double precision, with the compilation cache and the progress line."""
        from sdeinfer._progress import progress_line

        with progress_line(show=True):
            named_phase("loading JAX")
            import jax

            from sdeinfer._cache import use_compilation_cache

            jax.config.update("jax_enable_x64", True)  # noqa: FBT003
            use_compilation_cache()
            return super().invoke(ctx)


def named_phase(text: str) -> None:
    """Show the name of the next phase: see `sdeinfer._progress`, which is imported only when a command runs."""
    from sdeinfer import _progress

    _progress.phase(text)


def say(text: str, *, err: bool = False) -> None:
    """Clear the progress line and print a result."""
    named_phase("")
    typer.echo(text, err=err)


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> bool:  # noqa: FBT001
    if wanted:
        typer.echo(importlib.metadata.version("sdeinfer"))
        raise typer.Exit
    return wanted


@app.callback(help=WELCOME, epilog="`sdeinfer COMMAND --help` has flags and examples.")
def _sdeinfer(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the text above."""
    del version
