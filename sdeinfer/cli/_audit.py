"""The command `audit`."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import sdeinfer as si
from sdeinfer._files import first_line, staged_folder
from sdeinfer.cli._app import phase, say
from sdeinfer.cli._fits import print_tests


def audit_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="config.json of a Hugging Face model, its folder, or FILE.py[:FUNCTION] with a function that makes a "
            "model of a seed (PyTorch), nnx.Rngs (Flax) or a key (Equinox), called `make` if not named; the file's "
            "`inputs`, `architecture` and `branches` are used, if it has them",
        ),
    ],
    *,
    recipe: Annotated[str | None, typer.Option(help="what is declared, as gpt2; none: say what is")] = None,
    networks: Annotated[int, typer.Option(help="number of networks")] = 1,
    tokens: Annotated[int, typer.Option(help="number of tokens of a causal prompt")] = 4,
    seed: Annotated[int, typer.Option(help="seed of the weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for audit.html and audit.json")] = None,
) -> int:
    """Ask whether a network is initialised as it claims. Exit code 0: it passed, 1: it failed, 2: unusable input."""
    phase("making the model")
    path, _, function = model.partition(":")
    given = _of_file(Path(path), function or "make") if path.endswith(".py") else _of_configuration(Path(path))
    phase("auditing")
    found = si.audit(**given, recipe=recipe, networks=networks, tokens=tokens, seed=seed)
    if out is not None:
        phase("writing the page")
        with staged_folder(out) as folder:
            found.write(folder / "audit.json")
            si.report.write_audit(found, folder / "audit.html", command=shlex.join(["sdeinfer", *sys.argv[1:]]))
    print_tests(found.verdicts)
    say(found.verdict)
    if out is not None:
        say(f"written to {out}: audit.html, audit.json")
    return 0 if found.passed else 1


def _of_file(path: Path, name: str) -> dict[str, Any]:
    """The function of a Python file that makes a model, with the file's inputs and architecture."""
    if not path.is_file():
        raise si.InputError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise si.InputError(f"{path}: {error.name} is not installed: pip install {error.name}") from error
    except Exception as error:
        raise si.InputError(f"{path}: cannot be run ({type(error).__name__}: {first_line(error)})") from error
    make = getattr(module, name, None)
    if not callable(make):
        raise si.InputError(f"{path}: no function {name!r} that makes a model")
    return {"model": make, **{key: getattr(module, key, None) for key in ("inputs", "architecture", "branches")}}


def _of_configuration(path: Path) -> dict[str, Any]:
    """A function that makes the Hugging Face model of a configuration."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise si.InputError(f"{path}: no such configuration; give a config.json, or FILE.py:FUNCTION")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or "model_type" not in settings:
            raise si.InputError(f"{file}: no `model_type` in it: is it a configuration of Hugging Face?")
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise si.InputError(f"{file}: is not JSON ({first_line(error)})") from error
    for library in ("torch", "transformers"):
        if importlib.util.find_spec(library) is None:
            raise si.InputError(f"{file}: PyTorch makes its model: pip install torch transformers")
    import transformers  # pyright: ignore[reportMissingImports]

    try:
        config = transformers.AutoConfig.for_model(**settings)
        transformers.AutoModel.from_config(config).to("meta")
    except Exception as error:
        raise si.InputError(f"{file}: makes no model ({type(error).__name__}: {first_line(error)})") from error
    return {"model": lambda seed: transformers.AutoModel.from_config(config)}
