"""HTML from the templates of the package: pages of reports, and tables in notebooks."""

from typing import Any


def render(template: str, **values: Any) -> str:
    """Render a template; values are escaped, and a missing one is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sdeinfer"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["significant"] = significant
    return environment.get_template(template).render(**values)


def significant(value: float, digits: int) -> str:
    """A number with so many significant digits, zeros among them, so that numbers of a column have equally many."""
    return f"{value:#.{digits}g}".removesuffix(".")
