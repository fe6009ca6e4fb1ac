"""Names that can be imported from the package, and those that the API reference documents one by one.

    python tests/public_names.py

prints what is in one of both alone. A name counts once, wherever it can be imported from; modules do not count.
"""

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import sdeinfer

API = Path(__file__).parent.parent / "docs" / "api"
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:\w+):: (?:\w+\.)*(\w+)", re.MULTILINE)


def importable() -> dict[str, str]:
    """Public names, and a package that has each."""
    found = {}
    packages = [each.name for each in pkgutil.iter_modules(sdeinfer.__path__, "sdeinfer.") if each.ispkg]
    for package in ("sdeinfer", "sdeinfer.models", *packages):
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", dir(module)):
            if name[0] != "_" and not isinstance(getattr(module, name), ModuleType):
                found.setdefault(name, package)
    return found


def documented() -> set[str]:
    return {name for page in API.glob("*.rst") for name in DIRECTIVE.findall(page.read_text(encoding="utf-8"))}


if __name__ == "__main__":
    names = importable()
    for name in sorted(names.keys() - documented()):
        print(f"not documented: {names[name]}.{name}")
    print("documented, and not importable:", *sorted(documented() - names.keys()))
    print(f"{len(names)} importable, {len(documented())} documented")
