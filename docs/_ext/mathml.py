"""TeX as MathML at build time: pages with mathematics need neither a script nor a network."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write inline mathematics."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write mathematics on lines of its own, which scroll if they are wider than the page."""
    mathml = convert(_aligned(node.astext()), display="block")
    translator.body.append(f'<div class="math-block">{mathml}</div>')
    raise nodes.SkipNode


def _aligned(tex: str) -> str:
    """Several lines as one aligned block."""
    single = "\\\\" not in tex or "\\begin" in tex
    return tex if single else f"\\begin{{aligned}}{tex}\\end{{aligned}}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
