"""One home for each number: `docs/records/*.json`, which studies write and pages show.

A study calls the fixture `record` with the rows of its table; with `pytest --record` these go to the record, with the
commit, the date and the machine. Pages have the table between two comments,

    <!-- record coverage -->
    <!-- end -->

with `rows="64; 512"` and `columns=` for a part, and `run=no` without the line about the run; a number in prose is
followed by its place, `11.7<!-- latency / first run / seconds -->`. `python tests/records.py`
writes all pages anew. `test_records.py` fails where a page differs from its record, where a record was edited by hand,
and where the code that it speaks of is newer than the run: run the study again, or say why its numbers hold:

    python tests/records.py keep coverage --because "words of messages"
"""

import argparse
import ast
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "docs" / "records"

TABLE = re.compile(r"<!-- record (?P<name>\w+)(?P<options>[^>]*?) -->\n(?P<table>.*?)<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"[^\s|(>]+<!-- (?P<name>\w+) / (?P<row>[^>]+?) / (?P<column>[^>]+?) -->")
OPTION = re.compile(r'(\w+)=(?:"([^"]*)"|(\S+))')


def pages() -> Iterator[Path]:
    """Every page that may show a record."""
    yield ROOT / "README.md"
    yield ROOT / "paper" / "paper.md"
    yield from sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)


def read(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def write(name: str, record: dict[str, Any]) -> None:
    record["checksum"] = checksum(record)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    short = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{re.sub(r'\n\s+', ' ', found[1])}]", text)
    temporary = RECORDS / f".{name}.json"
    temporary.write_text(short + "\n", encoding="utf-8")
    temporary.replace(RECORDS / f"{name}.json")


def checksum(record: Mapping[str, Any]) -> str:
    """Of everything that a run writes."""
    return _hash(json.dumps({key: value for key, value in record.items() if key != "checksum"}, sort_keys=True))


def update(name: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Write the rows of a run; rows of studies that were not run again are kept."""
    record = read(name)
    machine = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
    run = [_git("rev-parse", "--short", "HEAD"), _today(), machine]
    if _git("status", "--porcelain", "--", *record["code"]):
        raise RuntimeError(f"commit {', '.join(record['code'])} before a run that is recorded")
    width = len(record["columns"]) - 1
    for key, cells in rows.items():
        if len(cells) != width:
            raise ValueError(f"record {name}, row {key!r} has {len(cells)} cells in place of {width}")
        record["rows"][key] = {"cells": list(map(str, cells)), "run": run}
    if {each["run"][0] for each in record["rows"].values()} == {run[0]}:  # other rows may be of older code
        record |= {"code": digests(record["code"]), "holds": []}
    write(name, record)


def keep(name: str, because: str) -> None:
    """Say why the numbers hold for the code as it is now."""
    record = read(name)
    if changed(record):
        record["holds"].append({"because": because, "date": _today()})
        record["code"] = digests(record["code"])
        write(name, record)


def changed(record: Mapping[str, Any]) -> list[str]:
    """The parts of the code that have changed since the record was made, or kept."""
    now = digests(record["code"])
    return [path for path, digest in record["code"].items() if now[path] != digest]


def digests(paths: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    return {path: _digest(ROOT / path) for path in paths}


@functools.cache
def _digest(path: Path) -> str:
    """Of statements: neither comments nor docstrings nor their layout count."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return _hash("".join(_statements(file) for file in files))


def _statements(file: Path) -> str:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant and isinstance(statement.value.value, str)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def shown(text: str) -> str:
    """A page with its tables and numbers as they are recorded."""
    text = TABLE.sub(lambda found: _block(found["name"], found["options"]), text)
    return NUMBER.sub(lambda found: _number(*found.groups()), text)


def _number(name: str, row: str, column: str) -> str:
    record = read(name)
    return f"{_cells(record, row)[column]}<!-- {name} / {row} / {column} -->"


def _block(name: str, options: str) -> str:
    record = read(name)
    chosen = {option: quoted or word for option, quoted, word in OPTION.findall(options)}
    rows = re.split("; *", chosen["rows"]) if "rows" in chosen else list(record["rows"])
    columns = re.split("; *", chosen["columns"]) if "columns" in chosen else record["columns"]
    lines = ["| " + " | ".join(columns) + " |", "|" + len(columns) * "---|"]
    lines += ["| " + " | ".join(_cells(record, row)[column] for column in columns) + " |" for row in rows]
    if chosen.get("run") != "no":
        lines += ["", _about_the_run(name, record, rows)]
    return f"<!-- record {name}{options} -->\n" + "\n".join(lines) + "\n<!-- end -->"


def _cells(record: Mapping[str, Any], row: str) -> dict[str, str]:
    if row not in record["rows"]:
        raise ValueError(f"no row {row!r} among {list(record['rows'])}")
    return dict(zip(record["columns"], [row, *record["rows"][row]["cells"]], strict=True))


def _about_the_run(name: str, record: Mapping[str, Any], rows: Sequence[str]) -> str:
    """When, where and by what the rows were found."""
    by_run: dict[str, list[str]] = {}
    for row in rows:
        by_run.setdefault("at {}, {}, on {}".format(*record["rows"][row]["run"]), []).append(row)
    first, *others = sorted(by_run, key=lambda run: -len(by_run[run]))
    text = f"Run {first}" + "".join(f"; {', '.join(by_run[run])}: {run}" for run in others)
    text += f": `{record['command']}`" + (f", {record['takes']}." if record.get("takes") else ".")
    if record["holds"]:
        text += f" The code has changed since; `docs/records/{name}.json` says why the numbers hold."
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    kept = commands.add_parser("keep", help="say why numbers hold although the code has changed")
    kept.add_argument("names", nargs="+")
    kept.add_argument("--because", required=True)
    asked = parser.parse_args()
    for name in asked.names if asked.command == "keep" else ():
        keep(name, asked.because)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := shown(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
