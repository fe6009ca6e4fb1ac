"""Outputs of scripts are found on pages, and compared: what is wrong fails, and Monte Carlo noise passes."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from printed_outputs import differences, scripts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]

PAGE = """# A page

```python
fit()
print(table)
```

% printed: mean, high within 0.2 sd; sd within 10 %
% printed: R-hat within 0.02

```text
          mean     sd    high  truth
gamma    0.611  0.007   0.625    0.6
c_minus -2.134  1.154   0.062   -2.0
R-hat    1.010
64 networks, 0.5
```

```{code-block} python
import torch
```

```{code-block} text
:class: sentence

of what is shown only
```

```python
silent()
```

```python
print(verdict)
```

% printed: numbers within 20 %

> good: trust gamma ± 1.2 %, tau0 ± 15 %, 2 heads
>
> a note
"""
TABLE, SILENT, SENTENCE = scripts(PAGE)


def printed(script) -> str:
    return "\n".join(line for _, line in script.output)


def test_outputs_are_found_below_their_scripts():
    assert [script.line for script in (TABLE, SILENT, SENTENCE)] == [4, 30, 34]
    assert TABLE.output[0] == (12, "          mean     sd    high  truth")
    assert TABLE.tolerances[:3] == [("mean", Decimal("0.2"), "sd"), ("high", Decimal("0.2"), "sd"), ("sd", 10, "%")]
    assert SILENT.output == []
    assert SENTENCE.output == [(39, "good: trust gamma ± 1.2 %, tau0 ± 15 %, 2 heads"), (41, "a note")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.611", "0.612"),
        ("-2.134", "-2.300"),  # a mean, by 0.15 of its sd
        ("  0.062", " -0.100"),  # the end of an interval
        ("1.154", "1.230"),
        ("1.010", "1.025"),
        ("\nR-hat", "\n\nR-hat"),
        ("-2.134  1.154   0.062   -2.0", "-2.1 1.2 0.1 -2.00"),  # white space, trailing zeros
    ],
)
def test_noise_and_layout_pass(old, new):
    assert printed(TABLE).count(old) == 1
    assert differences(TABLE, printed(TABLE).replace(old, new)) == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("0.611", "0.614", 13),  # by 0.4 sd, which of c_minus is within the tolerance
        ("-2.134", "-2.500", 14),
        ("-2.134", "2.134", 14),
        ("1.154", "1.300", 14),
        ("-2.0", "-2.1", 14),  # a truth has no tolerance
        ("1.010", "1.041", 15),
        ("0.5", "0.6", 16),  # nothing that varies
        ("64", "65", 16),
        ("c_minus", "c_plus", 14),
        ("networks", "", 16),
        ("1.010", "nan", 15),
    ],
)
def test_a_changed_number_or_word_fails_and_says_where(old, new, line):
    (found,) = differences(TABLE, printed(TABLE).replace(old, new))
    assert found.startswith(f"{line}: ")
    (row,) = (text for place, text in TABLE.output if place == line)
    assert f"expected: {row}\nprinted:  {row.replace(old, new).strip()}" in found


def test_sentences_are_compared():
    good = printed(SENTENCE)
    assert differences(SENTENCE, good.replace("15", "17").replace("1.2", "1.3")) == []
    for old, new in (("15", "25"), ("1.2", "1.6"), ("2 heads", "3 heads"), ("good", "do not trust yet"), ("±", "")):
        assert len(differences(SENTENCE, good.replace(old, new))) == 1, (old, new)


def test_lines_more_or_less_fail():
    for text in ("", printed(TABLE) + "\nmore", printed(TABLE).rpartition("\n")[0]):
        (found,) = differences(TABLE, text)
        assert found.startswith("4: 5 lines expected")
    assert differences(SILENT, "") == []
    assert differences(SILENT, "a word\n") == ["30: 0 lines expected:\n\n1 printed:\na word\n"]


def test_comments_that_say_nothing_are_refused():
    (misspelt,) = scripts(PAGE.replace("R-hat within", "Rhat within").partition("```{code-block}")[0])
    assert differences(misspelt, printed(misspelt)) == ["4: no number of the output has the name Rhat"]
    with pytest.raises(AssertionError, match="line 9: not a tolerance: R-hat 0.02"):
        scripts(PAGE.replace("R-hat within", "R-hat"))
    with pytest.raises(AssertionError, match="line 30: no output after a comment"):
        scripts(
            PAGE.replace("```python\nsilent", "% printed: x equal\n\n```python\nsilent").replace(
                "\n\n% printed: x", "\n% printed: x"
            )
        )
    with pytest.raises(AssertionError, match="line 43: a second output"):
        scripts(PAGE + "\n> more\n")


def test_summaries_of_other_draws_pass_and_of_other_laws_fail():
    """By the tolerances that pages have for fits, of 1000 independent draws."""

    def summary(seed: int, shift: float = 0.0, scale: float = 1.0) -> str:
        draws = shift + scale * np.random.default_rng(seed).normal(size=(3, 1000))
        low, high = np.quantile(draws, [0.025, 0.975], axis=1)
        table = {"mean": draws.mean(axis=1), "sd": draws.std(axis=1), "hdi_low": low, "hdi_high": high}
        return pd.DataFrame(table, index=list("abc")).round(3).to_string()

    comment = "% printed: mean within 0.2 sd; sd within 20 %; hdi_low, hdi_high within 0.5 sd"
    (script,) = scripts(f"```python\n```\n\n{comment}\n\n```text\n{summary(0)}\n```\n")
    assert [seed for seed in range(1, 100) if differences(script, summary(seed))] == []
    assert differences(script, summary(1, shift=0.5))
    assert differences(script, summary(1, scale=1.5))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_that_print_have_outputs(page):
    for script in scripts(page.read_text(encoding="utf-8")):
        assert bool(script.output) == ("print(" in script.code), f"{page.name}:{script.line}"
        assert differences(script, printed(script)) == []  # its comment names what is there


def test_pages_have_outputs():
    outputs = [script.output for page in PAGES for script in scripts(page.read_text(encoding="utf-8")) if script.output]
    assert len(outputs) >= 40
    assert sum(map(len, outputs)) >= 150
