"""Pages show what studies recorded, and every record is on a page."""

import pytest
import records


@pytest.mark.parametrize("page", list(records.pages()), ids=lambda page: page.relative_to(records.ROOT).as_posix())
def test_pages_show_the_records(page):
    text = page.read_text(encoding="utf-8")
    assert records.shown(text) == text, f"run `python tests/records.py`, which writes {page.name} anew"


def test_every_record_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in records.pages())
    shown = {found["name"] for found in records.TABLE.finditer(text)}
    assert shown == {path.stem for path in records.RECORDS.glob("*.json")}


def test_a_part_of_a_table_and_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    study = {"command": "pytest -m slow", "rooms": ["terms"], "code": {}, "columns": ["n", "held"], "rows": {}}
    records.write("study", study)
    records.update("study", {"64": [".5"], "128": [".4"]})
    page = 'Held .6<!-- study / 64 / held -->.\n<!-- record study rows="128" columns="held" run=no -->\n<!-- end -->\n'
    first, _, *table, _ = records.shown(page).splitlines()
    assert first.startswith("Held .5<!--")
    assert table == ["| held |", "|---|", "| .4 |"]


def test_a_page_says_that_code_has_changed_after_the_run(tmp_path, monkeypatch):
    (tmp_path / "room").mkdir()
    file = tmp_path / "room" / "a.py"

    def code(text: str) -> str:
        file.write_text(text, encoding="utf-8")
        return records.code_of.__wrapped__("room", tmp_path)

    ran = code('"""Words."""\nx = 1  # why\n')
    assert code('"""Other words."""\n\nx = 1\n') == ran
    assert code("x = 2\n") != ran
    monkeypatch.setattr(records, "code_of", {"room": "new", "other": ran}.get)
    record = {"rooms": ["room", "other"], "code": {"abc": {"room": ran, "other": ran}}, "rows": {"a": {"run": ["abc"]}}}
    assert list(records._what_changed(record, ["a"])) == ["The code of room has changed since."]
    again = record | {
        "again": {"says": "3 of 40 sets are the same", "commit": "def", "code": {"room": "new", "other": ran}}
    }
    assert list(records._what_changed(again, ["a"])) == ["At def 3 of 40 sets are the same."]
