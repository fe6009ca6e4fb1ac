"""Outputs that pages print below their scripts, compared with what the scripts print.

A script is a ```python block. Its output is the ```text block, the {code-block} text or the quotation between it and
the next code. Spaces and empty lines do not count. Words are equal, and so are numbers, except those to which a comment
(or <!-- printed: … -->) before the output gives a tolerance, for Monte Carlo error alone:

    % printed: truth equal; mean within 0.2 sd; R-hat within 0.02; numbers within 10 %

Names are headings of columns or beginnings of rows; `numbers` are those with a decimal point or a percent sign. The
first clause that names a number counts. A tolerance is a difference, a percentage of the page's number, or in units of
the page's number below another heading in the same row; one unit of the last digit is added to it.

Seeds are fixed, but rounding differs between machines and optimisation levels, and NUTS amplifies it: the draws of a
fit are as those of another seed. What does not depend on them is the same up to rounding, and needs no tolerance.
"""

import re
from dataclasses import dataclass, field
from decimal import Decimal

ELEMENT = re.compile(r"^(?:%|<!--) printed: (.*?)(?: -->)?$|^```(.*)\n((?:.*\n)*?)```$|((?:^>.*(?:\n|\Z))+)", re.M)
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?!\w)")
CLAUSE = re.compile(r"\s*(.+?) (?:equal|within ([\d.]+)(?: (\S+))?)\s*")


@dataclass
class Script:
    """A script of a page, and its output: lines with their places on the page, and tolerances."""

    code: str
    line: int
    output: list[tuple[int, str]] = field(default_factory=list)
    tolerances: list[tuple[str, Decimal, str]] = field(default_factory=list)


def scripts(text: str) -> list[Script]:
    """The scripts of a page in their order."""
    found, script, tolerances = [], None, []  # the code before, if it runs, and the comments since
    for element in ELEMENT.finditer(text):
        comment, opening, body, quoted = element.groups()
        line = text.count("\n", 0, element.start()) + 1
        if comment:
            for clause in comment.split(";"):
                match = CLAUSE.fullmatch(clause)
                assert match, f"line {line}: not a tolerance: {clause}"
                tolerances += [(name, Decimal(match[2] or 0), match[3] or "") for name in match[1].split(", ")]
        elif quoted or opening in ("text", "{code-block} text"):
            shown = [re.sub(r"^> ?|^:\w+:.*", "", each) for each in (quoted or body).splitlines()]
            if script is not None:
                assert not script.output, f"line {line}: a second output of one script"
                script.output = [(i, each) for i, each in enumerate(shown, line + (not quoted)) if each.strip()]
                script.tolerances = tolerances
            tolerances = []
        else:
            assert not tolerances, f"line {line}: no output after a comment on outputs"
            script = Script(body, line + 1) if opening == "python" else None
            found += [script] if script else []
    return found


def differences(script: Script, printed: str) -> list[str]:
    """What a page has otherwise than its script prints, with lines of the page."""
    lines = [line for line in printed.splitlines() if line.strip()]
    if len(lines) != len(script.output):
        expected = "\n".join(line for _, line in script.output)
        return [f"{script.line}: {len(script.output)} lines expected:\n{expected}\n{len(lines)} printed:\n{printed}"]
    found, used = [], set()
    for index, ((place, line), own) in enumerate(zip(script.output, lines, strict=True)):
        both = f"\nexpected: {line.strip()}\nprinted:  {own.strip()}"
        if [words.split() for words in NUMBER.split(line)] != [words.split() for words in NUMBER.split(own)]:
            found.append(f"{place}: other words{both}")
            continue
        for (number, name), other in zip(headings(script, index), NUMBER.findall(own), strict=True):
            allowed, named = allowance(script, index, number, name)
            used.add(named)
            if abs(Decimal(number[0]) - Decimal(other)) > allowed:
                found.append(f"{place}: {other} instead of {number[0]} ± {allowed.normalize():f}{both}")
    unused = [name for name, *_ in script.tolerances if name not in used]
    return found or [f"{script.line}: no number of the output has the name {name}" for name in unused]


def headings(script: Script, index: int) -> list[tuple[re.Match, str]]:
    """The numbers of a row, each with the nearest word above it that ends where it ends."""
    above = [word for _, line in script.output[:index][::-1] for word in re.finditer(r"\S+", line)]
    words = [word for word in above if not NUMBER.fullmatch(word[0])]
    row = NUMBER.finditer(script.output[index][1])
    return [(number, next((word[0] for word in words if word.end() == number.end()), "")) for number in row]


def allowance(script: Script, index: int, number: re.Match, name: str) -> tuple[Decimal, str]:
    """How far a number may be from that on the page, and by which name."""
    row = script.output[index][1]
    general = "numbers" if "." in number[0] or re.match(" ?%", row[number.end() :]) else ""
    units = {each: abs(Decimal(other[0])) for other, each in headings(script, index)}
    units |= {"": Decimal(1), "%": abs(Decimal(number[0])) / 100}
    for named, amount, unit in script.tolerances:
        if (named in (name, general) or f"{row.strip()} ".startswith(f"{named} ")) and unit in units:
            last_digit = Decimal(1).scaleb(int(Decimal(number[0]).as_tuple().exponent))
            return (amount * units[unit] + last_digit if amount else amount), named
    return Decimal(0), ""
