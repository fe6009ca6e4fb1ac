"""Pages show what studies recorded, of the code as it is."""

import json

import pytest
import records

NAMES = sorted(path.stem for path in records.RECORDS.glob("*.json"))


@pytest.mark.parametrize("page", list(records.pages()), ids=lambda page: page.relative_to(records.ROOT).as_posix())
def test_pages_show_the_records(page):
    text = page.read_text(encoding="utf-8")
    assert records.shown(text) == text, f"run `python tests/records.py`, which writes {page.name} anew"


@pytest.mark.parametrize("name", NAMES)
def test_records_are_as_they_were_written(name):
    record = records.read(name)
    assert record["checksum"] == records.checksum(record), f"{name}.json was edited by hand"


@pytest.mark.parametrize("name", NAMES)
def test_code_is_not_newer_than_its_numbers(name):
    record = records.read(name)
    changed = records.changed(record)
    keep = f"`python tests/records.py keep {name} --because …`"
    assert not changed, (
        f"{', '.join(changed)} changed: run `{record['command']} --record`, or say why its numbers hold: {keep}"
    )


def test_every_record_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in records.pages())
    assert {found["name"] for found in records.TABLE.finditer(text)} == set(NAMES)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A record of a package of one file."""
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(records, "_git", lambda *command: {"rev-parse": "abc1234", "status": ""}[command[0]])
    (tmp_path / "law.py").write_text("x = 1\n")
    record = {"command": "pytest -m slow", "code": ["law.py"], "columns": ["n", "held"], "rows": {}, "holds": []}
    records.write("study", record)
    records.update("study", {"64": [".5"], "128": [".4"]})
    records._digest.cache_clear()
    return tmp_path


PAGE = "Held .5<!-- study / 64 / held -->.\n\n<!-- record study -->\n<!-- end -->\n"


def test_numbers_on_a_page(recorded):
    page = records.shown(PAGE)
    assert "| 64 | .5 |\n| 128 | .4 |\n\nRun at abc1234" in page
    assert records.shown(page) == page
    by_hand = page.replace(".5", ".6")
    assert records.shown(by_hand) == page
    records.update("study", {"64": [".7"]})
    assert "| 64 | .7 |\n| 128 | .4 |" in records.shown(page)
    assert "Held .7<!--" in records.shown(page)


def test_a_part_of_a_table(recorded):
    page = records.shown('<!-- record study rows="128" columns="held" run=no -->\n<!-- end -->')
    assert page.splitlines()[1:-1] == ["| held |", "|---|", "| .4 |"]
    for wrong in ("<!-- record study rows=32 -->\n<!-- end -->", ".1<!-- study / 32 / held -->"):
        with pytest.raises(ValueError, match="no row '32'"):
            records.shown(wrong)


def test_a_record_edited_by_hand(recorded):
    record = records.read("study")
    assert record["checksum"] == records.checksum(record)
    record["rows"]["64"]["cells"] = [".9"]
    assert record["checksum"] != records.checksum(json.loads(json.dumps(record)))


def test_newer_code(recorded):
    def changed_by(code: str) -> list[str]:
        (recorded / "law.py").write_text(code)
        records._digest.cache_clear()
        return records.changed(records.read("study"))

    assert changed_by('"""Words."""\n\nx = 1  # more words\n') == []
    assert changed_by("x = 2\n") == ["law.py"]
    records.keep("study", "x is not used")
    assert changed_by("x = 2\n") == []
    assert records.read("study")["holds"][-1]["because"] == "x is not used"
    assert "docs/records/study.json` says why the numbers hold" in records.shown(PAGE)
    records.update("study", {"64": [".5"], "128": [".4"]})
    assert "has changed" not in records.shown(PAGE)


def test_a_row_of_newer_code_does_not_stand_for_the_others(recorded, monkeypatch):
    (recorded / "law.py").write_text("x = 2\n")
    records._digest.cache_clear()
    monkeypatch.setattr(records, "_git", lambda *command: {"rev-parse": "def5678", "status": ""}[command[0]])
    records.update("study", {"64": [".5"]})
    assert records.changed(records.read("study")) == ["law.py"]
    records.update("study", {"128": [".4"]})
    assert records.changed(records.read("study")) == []


def test_rows_of_a_wrong_size(recorded):
    with pytest.raises(ValueError, match="row '64' has 2 cells in place of 1"):
        records.update("study", {"64": [".5", ".4"]})
