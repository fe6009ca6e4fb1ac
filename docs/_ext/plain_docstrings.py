"""Docstrings are plain text: `names` are code, and signs of mathematics such as |x| and X* are themselves."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from sphinx.application import Sphinx

import sdeinfer as si

NAMES = {
    "PRNGKeyArray": r"\S*Key\[Array, ''\] \| \S*UInt32\[Array, '2'\] \| \S*UInt32\[Array, '4'\]",
    "ArrayLike": r"\S*Array \| \S*ndarray \| \S*bool \| \S*number \| bool \| int \| float \| complex",
}
CODE = re.compile(r"`+([^`]+)`+")
SIGN = re.compile(r"((?<![\w*])(\*{1,2})\w[^*]*?[\w.]\2(?![\w*]))|[*|]")
"""An emphasis, which stays, or a sign of mathematics."""
SECTION = re.compile(r"[A-Z][a-z]+:")


def escaped(line: str) -> str:
    """A line of a docstring as reStructuredText."""
    between = CODE.split(line)  # text, code, text, …
    for place, part in enumerate(between):
        if place % 2:
            between[place] = f"\\ ``{part}``\\ "
        else:
            plain = SIGN.sub(lambda sign: sign[1] or f"\\{sign[0]}", part)
            between[place] = re.sub(r"\w_(?=\W|$)", lambda name: f"{name[0][:-1]}\\_", plain)
    text = re.sub(r"(?<=: )(\w)\.(?= |$)", r"\1\\.", "".join(between))  # `n.` is no list
    return text.replace(" \\ ``", " ``").removesuffix("\\ ").removeprefix("\\ ")


def prior_text(parameter: Any) -> str:
    """The default prior of a parameter, with its arguments."""
    if parameter.prior is None:
        return "none"
    prior = parameter.prior()
    arguments = ", ".join(f"{name}={np.asarray(getattr(prior, name)):.3g}" for name in prior.arg_constraints)
    return f"{type(prior).__name__}({arguments})"


def docstring_of(obj: Any) -> str | None:
    """The text of an object whose own docstring is that of its type."""
    if isinstance(obj, si.Parameter):
        return (
            f"{obj.symbol}: {obj.meaning}. Default prior {prior_text(obj)}; sampled by the bijection {obj.bijection!r}."
        )
    if isinstance(obj, si.likelihood.AbstractModel):
        return inspect.getdoc(obj.program)
    return None


def as_markup(lines: list[str]) -> Iterator[str]:
    """Lines of a docstring as reStructuredText.

    Scripts between fences, or indented after ``::``, stay as they are. So do indented paragraphs between others, which
    are equations: as literal blocks they keep their lines and columns.
    """
    text = before = ""  # the last line that is not indented, and the line before
    fenced = False
    for line in lines:
        if line.strip().startswith("```"):
            fenced = not fenced
            yield from [f"{line.partition('```')[0]}.. code-block:: python", ""] if fenced else [""]
        elif fenced:
            yield f"    {line}"
        else:
            if line and not line.startswith(" "):
                text = line
            elif line.startswith("    ") and not before and text and not SECTION.fullmatch(text):
                if not text.endswith("::"):
                    yield from ["::", ""]
                    text = "::"
            yield line if text.endswith("::") and line.startswith(" ") else escaped(line)
        before = line


def escape(_app: Sphinx, what: str, _name: str, obj: Any, _options: Any, lines: list[str]) -> None:
    """Change the lines in place."""
    own = docstring_of(obj)
    lines[:] = as_markup([*own.splitlines(), ""] if own is not None else lines)
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # a comment: napoleon takes what is before a colon in the first line for a type


def shorten(_app: Sphinx, *about: Any) -> tuple[str, str | None]:
    """Names of types instead of the unions that they stand for."""
    *_, signature, result = about
    for name, union in NAMES.items():
        signature = re.sub(union, name, signature) if signature else signature
    return signature, result


def skip_fields(_app: Sphinx, _what: str, _name: str, obj: Any, _skip: Any, _options: Any) -> bool | None:
    """Leave out fields of named tuples, which the docstring of the class describes."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the changes, the first before napoleon, which writes markup of its own."""
    app.connect("autodoc-process-docstring", escape, priority=100)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip_fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
