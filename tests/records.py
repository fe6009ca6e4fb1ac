"""One home for each number: `docs/records/*.json`, which studies write and pages show.

With `pytest --record` the fixture `record` writes the rows of a table, with commit, date and machine. Pages have the
table between two comments, `<!-- record coverage -->` and `<!-- end -->`; `rows="64; 512"` and `columns=` choose a
part, and `run=no` leaves out the line about the run. A number in prose is followed by its place,
`11.7<!-- latency / first run / seconds -->`. `python tests/records.py` writes all pages anew.
"""

import datetime
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
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    run = [commit.stdout.strip(), today, f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"]
    for key, cells in rows.items():
        record["rows"][key] = {"cells": list(map(str, cells)), "run": run}
    write(name, record)


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
    return text + f": `{record['command']}`" + (f", {record['takes']}." if record.get("takes") else ".")


if __name__ == "__main__":
    for page in pages():
        page.write_text(shown(page.read_text(encoding="utf-8")), encoding="utf-8")
