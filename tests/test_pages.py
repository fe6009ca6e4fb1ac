"""Pages name what there is: objects of the package, commands with their options, files."""

import inspect
import re
from pathlib import Path

import pytest
import typer

import sdeinfer
from sdeinfer.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]


def is_there(name: str) -> bool:
    found = sdeinfer
    for part in name.split(".")[1:]:
        if any(part in inspect.get_annotations(kind) for kind in getattr(found, "__mro__", ())):
            return True  # an attribute of instances
        if not hasattr(found, part):
            return (ROOT / f"{name.replace('.', '/')}.py").exists()
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_are_there(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    names = re.findall(r"(?<![\w./\"'-])((?:si|sdeinfer)(?:\.[A-Za-z]\w*)+)(?![\w/*])", text)
    paths = re.findall(r"(?<![\w./:-])(?:sdeinfer|models|tests|notebooks|docs|paper)/[\w./-]*\w", text)
    links = re.findall(r"\]\(([\w./-]+\.\w+)", text)
    commands = re.findall(r"(?:`|^)sdeinfer ([a-z]\w*)([^`\n|#]*)", text, re.MULTILINE)
    gone = [name for name in names if not is_there(name)]
    gone += [path for path in paths if "_build" not in path and not (ROOT / path).exists()]
    gone += [link for link in links if not (page.parent / link).exists()]
    for command, rest in commands:
        options = {each for option in COMMANDS[command].params for each in (*option.opts, *option.secondary_opts)}
        gone += [f"{command} {option}" for option in re.findall(r"--[a-z][\w-]*", rest) if option not in options]
    assert not gone
