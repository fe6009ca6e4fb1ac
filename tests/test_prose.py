"""Pages are spelt as in Britain, link to what is there, name what the package has, and end before readers do.

`prose.py` has the checks. Each is shown what is wrong, too, so that none passes because it looks at nothing.
"""

import re

import prose
import pytest

PAGES = prose.pages()
LONGEST = 1500
"""Words of a page of the documentation, blocks of code aside."""

LONG: set[str] = set()
"""Pages that may be longer."""

OLD = re.compile(r"^### (?:Changed|Removed)\n.*?(?=^##|\Z)|^## \[(?!0\.1\.0\]).*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
"""Parts of the changelog that name what the package had: what is changed and gone, and versions before."""


def test_words_are_spelt_as_in_britain():
    found = [f"{page}:{line}: {it}" for page, text in PAGES.items() for line, it in prose.misspelt(text)]
    assert not found, "\n".join(found)


def test_links_lead_somewhere():
    found = [f"{page}:{line}: {it}" for page, text in PAGES.items() for line, it in prose.broken(text, page)]
    assert not found, "\n".join(found)


def test_names_are_those_of_the_package():
    new = PAGES | {page: prose.without(OLD, text) for page, text in PAGES.items() if page == "CHANGELOG.md"}
    found = [f"{page}:{line}: {it}" for page, text in new.items() for line, it in prose.dead(text)]
    assert not found, "\n".join(found)


def test_paths_in_docstrings_are_there():
    sources = [path for folder in ("sdeinfer", "models") for path in (prose.ROOT / folder).rglob("*.py")]
    names = {path: re.findall(r"`+([\w.]+/[\w./]+)`+", path.read_text(encoding="utf-8")) for path in sources}
    found = [f"{path}: {it}" for path, each in names.items() for name in each for it in prose.dead_paths(name)]
    assert not found, "\n".join(found)


def test_pages_are_short():
    lengths = {page: prose.length(text) for page, text in PAGES.items() if page.startswith("docs/")}
    assert {page: words for page, words in lengths.items() if words > LONGEST and page not in LONG} == {}
    assert {page for page in LONG if lengths.get(page, 0) <= LONGEST} == set()


def test_own_words_are_in_order():
    words = (prose.ROOT / "tests" / "words.txt").read_text(encoding="utf-8").split()
    assert words == sorted(set(words), key=lambda word: (word.lower(), word))


def faults(check, text: str, *about: str) -> list[tuple[int, str]]:
    return list(check(text, *about))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The covarience of tokens", [(1, "covarience: misspelt, or for tests/words.txt")]),
        ("One\n\n- Networks' inital layers", [(3, "inital: misspelt, or for tests/words.txt")]),
        ("a color, and\nits centre", [(1, "color: colour")]),
        ("to normalize sizes and a prize", [(1, "normalize: normalise")]),
        ("to discretize", [(1, "discretize: with an s")]),
        (":::{note} Titel\n:class: wsx\nWhat is wroong\n:::", [(3, "wroong: misspelt, or for tests/words.txt")]),
        ("```{tip}\nWhat is wroong\n```", [(2, "wroong: misspelt, or for tests/words.txt")]),
        ("`wroong` $wroong$ <!-- wroong --> [here](wroong.md) https://wroong.org x_wroong wroong.md", []),
        ("```python\nwroong\n```\n$$\nwroong\n$$\n", []),
        ("Łukasz's ReLU initialises mean-field neighbours’ colours, normalised", []),
    ],
)
def test_misspelt_words_are_found(text, expected):
    assert faults(prose.misspelt, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[start](docs/start.md) [map](docs/stat.md)", [(1, "link to docs/stat.md")]),
        ("# The top\n\n[up](#the-top)\n[down](#the-end)", [(4, "link to #the-end")]),
        ("![figure](notebooks/none.png)", [(1, "link to notebooks/none.png")]),
        ("[a](docs/start.md#no-such-heading)", [(1, "link to docs/start.md#no-such-heading")]),
        (
            "[one](https://arxiv.org/abs/2306.17759) [two](https://arxiv) [three](htp://arxiv.org)",
            [(1, "link to https://arxiv"), (1, "link to htp://arxiv.org")],
        ),
        ("[a]: docs/none.md", [(1, "link to docs/none.md")]),
        ('<img src="none.png">', [(1, "link to none.png")]),
        ("[empty]()", [(1, "link to ")]),
        ("[](docs/start.md)", [(1, "link to docs/start.md without a text")]),
        ("`[a](none.md)`\n```\n[a](none.md)\n```", []),
    ],
)
def test_broken_links_are_found(text, expected, monkeypatch, tmp_path):
    for name in ("docs/start.md", "README.md"):
        page = tmp_path / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text if name == "README.md" else "# Start", encoding="utf-8")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert faults(prose.broken, text, "README.md") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`si.fits` and `si.fit`", ["si.fits does not exist"]),
        ("`plots.plot_nothing`, `sdeinfer.plots.plot_ranks`", ["plots.plot_nothing does not exist"]),
        ("`si.fit(..., draw=1)` `si.fit(…, sampler=)`", ["si.fit takes no draw"]),
        ("`sdeinfer.nothing`", ["sdeinfer.nothing does not exist"]),
        ("`si.Check.told`, `diagnostics.Check.identified`", ["si.Check.told does not exist"]),
        ("`simulate_nothing_at_all`, `simulate_stopped`", ["simulate_nothing_at_all is in no code"]),
        ("`StoppedRoutes`", ["StoppedRoutes is in no code"]),
        ("`sdeinfer/solve/_none.py`, `sdeinfer/solve/`", ["sdeinfer/solve/_none.py does not exist"]),
        ("`tests/test_prose.py::test_nothing`", ["tests/test_prose.py has no test_nothing"]),
        ("`_no_such_file.py`, `prose.py`", ["_no_such_file.py does not exist"]),
        ("`sdeinfer fit --colour`", ["sdeinfer fit has no --colour"]),
        ("`sdeinfer paint`", ["there is no command paint"]),
        ("`--colour`, `--chains 2`, `--record`", ["no command has --colour"]),
        ("`pytest -m sloow tests/none`", ["tests/none does not exist"] * 2 + ["there is no marker sloow"]),
        ("```sh\nuv run sdeinfer fit data.nc \\\n  --colour red\n```", ["sdeinfer fit has no --colour"]),
        ("```{code-block} python\npost = si.fit(program, data)\nsi.fits(1)\n```", ["si.fits does not exist"]),
        ("```text\nsi.fits\n```", []),
        ("`report.html` `{py:func}` `blocks.*.mixer` `attention.strength` `sdeinfer fit data.nc --chains 2`", []),
    ],
)
def test_dead_names_are_found(text, expected):
    assert [it for _, it in sorted(faults(prose.dead, text), key=lambda fault: fault[1])] == expected


def test_the_line_of_a_dead_name():
    assert faults(prose.dead, "One\n\n`si.fits`") == [(3, "si.fits does not exist")]
    assert faults(prose.dead, "One\n\n```python\nx = 1\nsi.fits\n```") == [(5, "si.fits does not exist")]


def test_words_are_counted_outside_of_code():
    text = (
        "---\na: b\n---\n# One two\nThree `four` [five](x.md) $six$\n\n| a | b |\n|---|---|\n\n```python\nx = 1\n```\n"
    )
    assert prose.length(text) == 8
    assert prose.length("word " * (LONGEST + 1)) > LONGEST


def test_changes_of_the_changelog_may_name_what_was():
    text = "## [0.1.0]\n### Added\nnew\n### Changed\nold\n### Fixed\nnew\n## [0.0.9]\n### Added\nold\n"
    assert "old" not in prose.without(OLD, text)
    assert prose.without(OLD, text).count("new") == 2
