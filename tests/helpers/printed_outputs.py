"""What pages print below their scripts has the words of what the scripts print; numbers are not compared.

A script is a ```python block. Its output is the ```text block, the {code-block} text or the quotation between it and
the next code. Seeds are fixed, but rounding differs between machines, and NUTS amplifies it.
"""

import re
from dataclasses import dataclass

ELEMENT = re.compile(r"^```(.*)\n((?:.*\n)*?)```$|((?:^>.*(?:\n|\Z))+)", re.MULTILINE)
ALTERNATIVE = re.compile(r" \([^()]* in place of [^()]*\)")
"""What another size would give: which moves a parameter most, and which parameter, may change with its error."""

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?!\w)")


@dataclass
class Script:
    """A script of a page, its line, and the output below it."""

    code: str
    line: int
    output: str = ""


def scripts(text: str) -> list[Script]:
    """The scripts of a page in their order."""
    found, script = [], None
    for element in ELEMENT.finditer(text):
        opening, body, quoted = element.groups()
        if quoted or opening in ("text", "{code-block} text"):
            if script is not None:
                script.output += re.sub(r"^> ?|^:\w+:.*", "", quoted or body, flags=re.MULTILINE)
        else:
            script = Script(body, text.count("\n", 0, element.start()) + 2) if opening == "python" else None
            found += [script] if script else []
    return found


def difference(script: Script, printed: str) -> str:
    """Both outputs, if they differ in more than numbers and spaces; else nothing."""
    same = words(script.output) == words(printed)
    return "" if same else f"line {script.line}: expected\n{script.output}\nprinted\n{printed}"


def words(text: str) -> list[str]:
    return NUMBER.sub(" # ", ALTERNATIVE.sub("", text)).split()
