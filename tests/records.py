"""One home for each number: `docs/records/*.json`, which studies write and pages show.

With `pytest --record` the fixture `record` writes the rows of a table, with commit, date and machine. Pages have the
table between two comments, `<!-- record coverage -->` and `<!-- end -->`; `rows="64; 512"` and `columns=` choose a
part, and `run=no` leaves out the line about the run. That line names the rooms of the package that a record is about
and whose code changed after the run; comments, docstrings and names of locals do not count. After a change that should
change no result, `confirm` notes that a part of the run gave the same results. A number in prose is followed by its
place, `11.7<!-- latency / first run / seconds -->`. `python tests/records.py` writes all pages anew.
"""

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


def write(name: str, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, indent=1, ensure_ascii=False)
    short = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{re.sub(r'\n\s+', ' ', found[1])}]", text)
    (RECORDS / f"{name}.json").write_text(short + "\n", encoding="utf-8")


def update(name: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Write the rows of a run; other rows are kept."""
    record = read(name)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    cores = len(os.sched_getaffinity(0))
    run = [_commit(), today, f"{cores} core{'s' * (cores > 1)}, {platform.machine()}"]
    for key, cells in rows.items():
        record["rows"][key] = {"cells": list(map(str, cells)), "run": run}
    commits = {row["run"][0] for row in record["rows"].values()}
    code = record["code"] | {run[0]: {room: code_of(room) for room in record["rooms"]}}
    record["code"] = {each: code[each] for each in code if each in commits}
    record.pop("again", None)
    write(name, record)


def confirm(name: str, says: str) -> None:
    """Note what a part of a run gave at the present commit, as "14 of 402 sets have the same verdicts"."""
    record = read(name)
    code = {room: code_of(room) for room in record["rooms"]}
    write(name, record | {"again": {"says": says, "commit": _commit(), "code": code}})


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@functools.cache
def code_of(room: str, package: Path = ROOT / "sdeinfer") -> str:
    """A hash of the code of a folder of the package, without comments, docstrings and the names of locals."""
    text = "".join(_code(file) for file in sorted((package / room).rglob("*.py")))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _code(file: Path) -> str:
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]
    for function in _outermost_functions(tree):
        _number_locals(function)
    return ast.unparse(tree)


def _outermost_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
        else:
            yield from _outermost_functions(node)


def _number_locals(function: ast.AST) -> None:
    """Replace the names of parameters and variables of a function, and of functions in it, by their order."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name | ast.arg)]
    bound = {node.arg for node in names if isinstance(node, ast.arg)}
    bound |= {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    order: dict[str, str] = {}
    for node in names:
        field = "arg" if isinstance(node, ast.arg) else "id"
        if (name := getattr(node, field)) in bound:
            setattr(node, field, order.setdefault(name, f"local_{len(order)}"))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def cells(record: Mapping[str, Any], row: str) -> dict[str, str]:
    """A row of a record by its columns."""
    return dict(zip(record["columns"], [row, *record["rows"][row]["cells"]], strict=True))


def shown(text: str) -> str:
    """A page with its tables and numbers as they are recorded."""
    text = TABLE.sub(lambda found: _table(found["name"], found["options"]), text)
    return NUMBER.sub(lambda found: _number(*found.groups()), text)


def _number(name: str, row: str, column: str) -> str:
    return f"{cells(read(name), row)[column]}<!-- {name} / {row} / {column} -->"


def _table(name: str, options: str) -> str:
    record = read(name)
    chosen = {option: quoted or word for option, quoted, word in OPTION.findall(options)}
    rows = re.split("; *", chosen["rows"]) if "rows" in chosen else list(record["rows"])
    columns = re.split("; *", chosen["columns"]) if "columns" in chosen else record["columns"]
    lines = ["| " + " | ".join(columns) + " |", "|" + len(columns) * "---|"]
    lines += ["| " + " | ".join(cells(record, row)[column] for column in columns) + " |" for row in rows]
    if chosen.get("run") != "no":
        lines += ["", _about_the_run(record, rows)]
    return f"<!-- record {name}{options} -->\n" + "\n".join(lines) + "\n<!-- end -->"


def _about_the_run(record: Mapping[str, Any], rows: Sequence[str]) -> str:
    """When, where and by what the rows were found."""
    by_run: dict[str, list[str]] = {}
    for row in rows:
        by_run.setdefault("at {}, {}, on {}".format(*record["rows"][row]["run"]), []).append(row)
    first, *others = sorted(by_run, key=lambda run: -len(by_run[run]))
    text = f"Run {first}" + "".join(f"; {', '.join(by_run[run])}: {run}" for run in others)
    text += f": `{record['command']}`" + (f", {record['takes']}." if record.get("takes") else ".")
    return " ".join([text, *_what_changed(record, rows)])


def _what_changed(record: Mapping[str, Any], rows: Sequence[str]) -> Iterator[str]:
    """Sentences on a part that was run again, and on rooms whose code is not that of the last run of some row."""
    if again := record.get("again"):
        yield f"At {again['commit']} {again['says']}."
    runs = [again["code"]] if again else [record["code"][record["rows"][row]["run"][0]] for row in rows]
    changed = [room for room in record["rooms"] if any(run.get(room) != code_of(room) for run in runs)]
    if len(changed) > 2:
        yield f"The code of {len(changed)} rooms has changed since."
    elif changed:
        yield f"The code of {' and '.join(changed)} has changed since."


if __name__ == "__main__":
    for page in pages():
        page.write_text(shown(page.read_text(encoding="utf-8")), encoding="utf-8")
