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
    records.write("study", {"command": "pytest -m slow", "columns": ["n", "held"], "rows": {}})
    records.update("study", {"64": [".5"], "128": [".4"]})
    page = 'Held .6<!-- study / 64 / held -->.\n<!-- record study rows="128" columns="held" run=no -->\n<!-- end -->\n'
    first, _, *table, _ = records.shown(page).splitlines()
    assert first.startswith("Held .5<!--")
    assert table == ["| held |", "|---|", "| .4 |"]
