"""The help text of a command, as it prints it: ``.. command-help:: fit``; without a name that of ``sdeinfer``."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class CommandHelp(SphinxDirective):
    """A section with the help text of one command."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Call the command with --help."""
        from typer.testing import CliRunner

        from sdeinfer.cli import app

        name = " ".join(self.arguments)
        printed = CliRunner().invoke(
            app,
            [*self.arguments, "--help"],
            prog_name="sdeinfer",
            env={"COLUMNS": "78", "NO_COLOR": "1", "TERM": "dumb"},
        )
        if printed.exit_code:
            raise self.error(f"sdeinfer {name} --help ended with {printed.exit_code}")
        text = nodes.literal_block(printed.output, printed.output.strip())
        text["language"] = "text"
        return [text]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
