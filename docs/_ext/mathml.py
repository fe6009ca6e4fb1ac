"""TeX as MathML at build time: pages with mathematics need neither a script nor a network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

NOT_CONVERTED = re.compile(r"<m[a-z]+[^>]*>(\\[A-Za-z]+|&)<")

logger = logging.getLogger(__name__)


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write inline mathematics."""
    translator.body.append(_mathml(node, node.astext(), display="inline"))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write mathematics on lines of its own, which scroll if they are wider than the page."""
    mathml = _mathml(node, _aligned(node.astext()), display="block")
    translator.body.append(f'<div class="math-block">{mathml}</div>')
    raise nodes.SkipNode


def _mathml(node: nodes.Node, tex: str, *, display: str) -> str:
    """MathML of TeX; a warning if the converter leaves a part of it."""
    mathml = convert(tex, display=display)
    left = NOT_CONVERTED.search(mathml)
    if left:
        logger.warning("%s in mathematics has no MathML: %s", left[1], tex, location=node)
    return mathml


def _aligned(tex: str) -> str:
    """Several lines as one aligned block, in the name of it that the converter knows."""
    if "\\\\" in tex and "\\begin" not in tex:
        return f"\\begin{{align*}}{tex}\\end{{align*}}"
    return tex.replace("{aligned}", "{align*}")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
