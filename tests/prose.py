"""What readers read: the prose of the pages, the links and the names in it, and what is wrong with them.

Each check takes a text, and yields the line and the fault; `tests/test_prose.py` runs them over every page.
"""

import ast
import importlib
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import records

ROOT = Path(__file__).parent.parent
ROOMS = {path.name for path in (ROOT / "sdeinfer").iterdir() if (path / "__init__.py").exists()} | {"models"}
TOP = r"(?:sdeinfer|models|tests|notebooks|docs|paper)/"

FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->|^%.*?$", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"^([ \t]*)(```+)([^\n`]*)\n(.*?)^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
SAID = re.compile(r"\{(?:admonition|figure-cards|note|tip|warning|important|seealso)\}")
LITERAL = re.compile(r"(?<!`)(\{[\w:-]+\})?(`+)(?!`)(.+?)(?<!`)\2(?!`)", re.DOTALL)
MATHEMATICS = re.compile(r"\$\$.*?\$\$|(?<!\\)\$[^$\n]+(?:\n[^$\n]+)?\$", re.DOTALL)
TARGET = re.compile(r"(?<=\])(?:\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+\"[^\"]*\")?\)|\{[^}]*\})")
ELSEWHERE = re.compile(
    r"<?https?://\S+|\[?-?@[\w:]+|^\[\S+\]:.*$|\b[\w./-]+\.(?:md|py|json|ipynb|nc|html)\b", re.MULTILINE
)
DIRECTIVE = re.compile(r"^\s*:::+.*$|^\s*:[\w-]+:(?= |$).*$", re.MULTILINE)

Fault = tuple[int, str]


def pages() -> dict[str, str]:
    """The texts by their paths; of notebooks, the Markdown cells."""
    found = [*records.pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in found}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        said = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        texts[path.relative_to(ROOT).as_posix()] = "\n\n".join(said)
    return dict(sorted(texts.items()))


def without(pattern: re.Pattern, text: str) -> str:
    """Blanks in place of what a pattern matches; lines keep their numbers."""
    return pattern.sub(lambda match: " " + "\n" * match[0].count("\n"), text)


def without_code(text: str) -> str:
    """A text without front matter, comments and blocks of code; admonitions stay."""

    def spoken(fence: re.Match) -> str:
        lines = fence[0].count("\n")
        return f"\n{fence[4]}" if SAID.match(fence[3]) else " " + "\n" * lines

    return FENCE.sub(spoken, without(COMMENT, without(FRONT_MATTER, text)))


def prose(text: str) -> str:
    """The words of a text: no code, names, mathematics, targets of links or addresses."""
    text = without_code(text)
    for pattern in (LITERAL, MATHEMATICS, TARGET, ELSEWHERE, DIRECTIVE):
        text = without(pattern, text)
    return text


def line_of(text: str, place: int) -> int:
    """The line of a character."""
    return text.count("\n", 0, place) + 1


# Length


def length(text: str) -> int:
    """The number of words, names and tables among them, outside of blocks of code."""
    text = without_code(text)
    for pattern in (TARGET, DIRECTIVE):
        text = without(pattern, text)
    return len(re.findall(r"\S*\w\S*", text))


# Spelling

WORD = re.compile(r"(?<![\w\\.^])[^\W\d_]+(?:['’][^\W\d_]+)?(?![\w^(])")
AMERICAN = re.compile(r"(\w{3,})(?<!size)(?<!prize)(?<!seize)(iz|yz)(es?|ed|er|ers|ing|ations?|able)")


@cache
def dictionary() -> tuple[frozenset[str], dict[str, str]]:
    """English words, with the British forms that the list of them leaves out; American forms, with the British.

    A list of words finds six times as many misspellings as a list of misspellings does, for some 150 words of our own
    in tests/words.txt. `pyspellchecker` is pure Python and knows both spellings, mostly; `codespell` pairs them.
    """
    from spellchecker import SpellChecker

    english = set(SpellChecker().word_frequency.dictionary)
    pairs = files("codespell_lib").joinpath("data", "dictionary_en-GB_to_en-US.txt").read_text(encoding="utf-8")
    british = {ours: theirs for ours, _, theirs in (line.partition("->") for line in pairs.splitlines())}
    own = (ROOT / "tests" / "words.txt").read_text(encoding="utf-8").splitlines()
    american = {theirs: ours for ours, theirs in british.items() if theirs not in BRITISH_TOO}
    return frozenset(english | british.keys() | set(own)), american


BRITISH_TOO = {
    "biased",
    "check",
    "checks",
    "disk",
    "focused",
    "license",
    "meter",
    "meters",
    "practice",
    "program",
    "programs",
}
"""American forms that Britons use, too."""


def misspelt(text: str) -> Iterator[Fault]:
    """Words that no list has, and American forms."""
    words, american = dictionary()
    text = prose(text)
    for match in WORD.finditer(text):
        word = match[0].replace("’", "'").removesuffix("'s").removesuffix("'")
        small = word.lower()
        if len(word) < 3 or not word.isascii() or word[1:] != word[1:].lower():
            continue  # names of things: ReLU, SDEs
        if small in american:
            yield line_of(text, match.start()), f"{word}: {american[small]}"
        elif AMERICAN.fullmatch(small):
            yield line_of(text, match.start()), f"{word}: with an s"
        elif not {word, small, re.sub("([iy])s(e|i|a)", r"\1z\2", small)} & words:
            yield line_of(text, match.start()), f"{word}: misspelt, or for tests/words.txt"


# Links

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)")
DEFINED = re.compile(r"^\[[^\]^]+\]:\s*(\S+)|<(https?:[^>]*)>|(?:src|href)=\"([^\"]*)\"", re.MULTILINE)
ADDRESS = re.compile(r"[\w-]+(\.[\w-]+)+(:\d+)?")


@cache
def anchors(path: Path) -> frozenset[str]:
    """Names of the headings of a page, as GitHub and MyST make them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n\n".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    found = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for title in re.findall(r"^#+ +(.*?)\s*$", without(FENCE, text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(next(each for each in (slug, *(f"{slug}-{k}" for k in range(1, 99))) if each not in found))
    return frozenset(found)


def broken(text: str, page: str) -> Iterator[Fault]:
    """Links to a file or heading that is not there, or without a text; addresses that are none."""
    text = without(LITERAL, without_code(text))
    found = [*LINK.finditer(text), *DEFINED.finditer(text)]
    for match in found:
        link = next(filter(None, match.groups()), "")
        parts = urlsplit(link)
        if parts.scheme in ("http", "https"):
            there = ADDRESS.fullmatch(parts.netloc) is not None
        elif parts.scheme or not link:
            there = parts.scheme == "mailto" and "@" in parts.path
        else:
            target = (ROOT / page).parent / parts.path if parts.path else ROOT / page
            there = target.exists() and (
                not parts.fragment or target.suffix == ".rst" or parts.fragment in anchors(target.resolve())
            )
        if not there:
            yield line_of(text, match.start()), f"link to {link}"
        elif match[0].startswith("[]("):  # the site would fill in a title, GitHub does not
            yield line_of(text, match.start()), f"link to {link} without a text"


# Names

PATH = re.compile(rf"(?<![\w./-])(?:{TOP}[\w./-]*\w|[\w-]+\.(?:py|ipynb|md)|{TOP})(?:::(\w+))?(?![\w*{{<])")
FILE = re.compile(r"\.(html|json|nc|py|png|md|rst|zarr|npy|npz|txt)\b")
NAME = re.compile(r"[a-z]+\w*_\w+|(?:[A-Z][a-z0-9]+){2,}|[A-Z]+_[A-Z_]+")
SHELL = re.compile(r"sh|bash|console|shell|text")


def dead(text: str) -> Iterator[Fault]:
    """Names of files, objects, arguments and options that are not there."""
    text = without(COMMENT, without(FRONT_MATTER, text))
    for fence in FENCE.finditer(text):
        start, code = line_of(text, fence.start(4)), fence[4]
        if "python" in fence[3]:
            yield from (
                (start + line_of(code, at) - 1, it)
                for at, it in dead_objects(code, roots=frozenset({"si", "sdeinfer"}))
            )
        elif SHELL.fullmatch(fence[3].strip()):
            for command in re.finditer(r"(?:.*\\\n)*.*", code):
                yield from ((start + line_of(code, command.start()) - 1, it) for it in dead_command(command[0]))
    text = without(FENCE, text)
    for literal in LITERAL.finditer(text):
        if literal[1] or "\n\n" in literal[3]:
            continue  # a role, which the site's build looks up; or two ends of code
        line, code = line_of(text, literal.start()), " ".join(literal[3].split())
        yield from ((line, it) for it in dead_paths(code))
        yield from ((line, it) for _, it in dead_objects(code, roots=frozenset({"si", "sdeinfer"} | ROOMS)))
        yield from ((line, it) for it in dead_command(code))
        yield from ((line, it) for it in dead_options(code))
        if NAME.fullmatch(code) and code not in used_names():
            yield line, f"{code} is in no code"


@cache
def file_names() -> frozenset[str]:
    """Names of the files of the repository, without their folders."""
    folders = ("sdeinfer", "models", "tests", "docs", "notebooks", "paper")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.*")) | {
        path.name for path in ROOT.iterdir()
    }


def dead_paths(code: str) -> Iterator[str]:
    """Paths, from the top of the repository or names alone, and the tests named behind them."""
    for match in PATH.finditer(code):
        path = match[0].partition("::")[0]
        there = (
            "_build" in path or (ROOT / path).exists()
            if "/" in path
            else path in file_names() or path[0] == "_" and path == "_file.py"
        )
        if not there:
            yield f"{path} does not exist"
        elif match[1] and f"def {match[1]}(" not in (ROOT / path).read_text(encoding="utf-8"):
            yield f"{path} has no {match[1]}"


def dead_objects(code: str, *, roots: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Dotted names of the package, and keyword arguments of its functions."""
    code = code.replace("…", "...")
    for match in re.finditer(rf"(?<![\w./\"'-])({'|'.join(sorted(roots))})((?:\.[A-Za-z]\w*)+)(?![\w/*])", code):
        if FILE.search(match[0]):
            continue
        try:
            found = resolved(match[0])
        except AttributeError:
            yield match.start(), f"{match[0]} does not exist"
        else:
            yield from ((match.start(), it) for it in dead_arguments(found, match[0], code[match.end() :]))


@cache
def resolved(name: str) -> Any:
    """The object of a dotted name; attributes of instances are annotations of their class."""
    first, *rest = name.split(".")
    found: Any = importlib.import_module("sdeinfer")
    for part in rest if first in ("si", "sdeinfer") else [first, *rest]:
        if inspect.isclass(found) and part in {
            name for kind in found.__mro__ for name in inspect.get_annotations(kind)
        }:
            return None
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ImportError as error:
                if error.name and not error.name.startswith("sdeinfer"):
                    return None  # a module for a library that is not installed
                raise AttributeError(name) from error
        else:
            found = getattr(found, part)
    return found


def dead_arguments(found: Any, name: str, rest: str) -> Iterator[str]:
    """Keyword arguments of a call that its function does not take."""
    if not rest.startswith("(") or not callable(found):
        return
    inside = rest[
        : 1 + next((at for at in range(len(rest)) if rest[: at + 1].count("(") == rest[: at + 1].count(")")), 0)
    ]
    try:
        call = ast.parse("f" + re.sub(r"=\s*(?=[,)])", "=0", inside), mode="eval").body
        taken = inspect.signature(found).parameters
    except (SyntaxError, ValueError, TypeError):
        return
    free = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    for keyword in call.keywords if isinstance(call, ast.Call) and not free else []:
        if keyword.arg and keyword.arg not in taken:
            yield f"{name} takes no {keyword.arg}"


@cache
def used_names() -> frozenset[str]:
    """Every name in the code of the repository: a name of ours that is in none of it is gone."""
    code = [
        path.read_text(encoding="utf-8")
        for folder in ("sdeinfer", "models", "tests")
        for path in (ROOT / folder).rglob("*.py*")
        if path.suffix in (".py", ".pyi") and path.stem not in ("prose", "test_prose")
    ]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code += [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.py")]
    code += [fence[4] for text in pages().values() for fence in FENCE.finditer(text) if "python" in fence[3]]
    return frozenset(re.findall(r"\w+", "\n".join(code)))


@cache
def options() -> dict[str, frozenset[str]]:
    """The commands, and the options of each."""
    import typer

    from sdeinfer.cli import app

    commands = typer.main.get_command(app).commands  # pyright: ignore
    return {
        name: frozenset(option for each in command.params for option in (*each.opts, *each.secondary_opts)) | {"--help"}
        for name, command in commands.items()
    }


def dead_command(code: str) -> Iterator[str]:
    """Commands of the package with their options; those of pytest with their files and markers."""
    code = re.sub(r"\\\n", " ", code.partition("  #")[0])
    for part in re.split(r"&&|;|\|", code):
        words = part.split()
        words = words[words.index("run") + 1 :] if words[:2] == ["uv", "run"] else words
        if words[:1] == ["sdeinfer"] and len(words) > 1 and not words[1].startswith("-"):
            if words[1] not in options():
                yield f"there is no command {words[1]}"
                continue
            given = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word)}
            yield from (f"sdeinfer {words[1]} has no {option}" for option in sorted(given - options()[words[1]]))
        elif "pytest" in words[:3]:
            yield from (
                f"{word} does not exist"
                for word in words
                if re.match(TOP, word) and not (ROOT / word.partition("::")[0]).exists()
            )
            for marker in re.findall(r"-m (\"[^\"]*\"|\w+)", part.partition("pytest")[2]):
                unknown = set(re.findall(r"\w+", marker)) - markers() - {"and", "or", "not"}
                yield from (f"there is no marker {word}" for word in sorted(unknown))


@cache
def markers() -> frozenset[str]:
    """The markers of the tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return frozenset(marker.partition(":")[0] for marker in settings["tool"]["pytest"]["ini_options"]["markers"])


def dead_options(code: str) -> Iterator[str]:
    """An option alone, which some command has, or the tests."""
    if re.match(r"--[a-z]", code):
        option = re.split(r"[ =]", code)[0]
        if option not in frozenset().union(*options().values()) | own_options():
            yield f"no command has {option}"


@cache
def own_options() -> frozenset[str]:
    """The options of the tests, and of scripts beside them."""
    scripts = [
        path.read_text(encoding="utf-8") for folder in ("tests", "notebooks") for path in (ROOT / folder).glob("*.py")
    ]
    return frozenset(
        option for each in scripts for option in re.findall(r"(?:addoption|add_argument)\(\s*\"(--[\w-]+)\"", each)
    )
