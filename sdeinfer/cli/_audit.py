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
from sdeinfer.cli._app import named_phase, say


def audit_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="config.json of a Hugging Face model, its folder, or FILE.py[:FUNCTION] with a function that makes a "
            "model, of a seed or without arguments, called `make` if not named; the file's `inputs` are used, if it "
            "has them",
        ),
    ],
    *,
    recipe: Annotated[str | None, typer.Option(help="what is declared, as auto or gpt2; none: say what is")] = None,
    like: Annotated[
        str | None, typer.Option(help="another model to compare with role by role, given like MODEL")
    ] = None,
    causal: Annotated[
        bool | None, typer.Option(help="whether tokens are declared not to see later ones; default: not declared")
    ] = None,
    norm: Annotated[
        str | None,
        typer.Option(help="declared places of norms: pre, post, sandwich, qk, or several as pre+qk"),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="a kind of finding that is as declared, as zeros; repeatable")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the weights")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for audit.html and audit.json")] = None,
) -> int:
    """Ask whether a network is initialised as it claims.

    Exit code 0: no test failed, 1: failed, 2: unusable input, 3: something declared was not tested.
    """
    named_phase("making the model")
    make, inputs = _given(model)
    reference = None if like is None else _given(like)[0]
    named_phase("auditing")
    declared = {"causal": causal, "norm": norm, "allow": allow or ()}
    audit = si.audit(make, inputs, recipe=recipe, like=reference, **declared, seed=seed)
    if out is not None:
        named_phase("writing the page")
        with staged_folder(out) as folder:
            audit.write(folder / "audit.json")
            si.report.write_audit(audit, folder / "audit.html", command=shlex.join(["sdeinfer", *sys.argv[1:]]))
    for test in audit.failed[:12]:
        say(f"  FAILED  {test.topic}: {test.says}{f': {test.cause}' if test.cause else ''}")
    for says in audit.untested if audit.declared else ():
        say(f"  NOT TESTED  {says}")
    say(audit.verdict)
    if out is not None:
        say(f"written to {out}: audit.html, audit.json")
    return 1 if audit.passed is False else 3 if audit.declared and audit.untested else 0


def _given(model: str) -> tuple[Any, Any]:
    """A function of a seed that makes a model, and its inputs."""
    path, _, function = model.partition(":")
    return _of_file(Path(path), function or "make") if path.endswith(".py") else (_of_configuration(Path(path)), None)


def _of_file(path: Path, name: str) -> tuple[Any, Any]:
    """The function of a Python file that makes a model, with the file's inputs."""
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
    from sdeinfer.passes._models import made

    def model(seed: int) -> Any:
        try:
            return made(make, seed)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise si.InputError(f"{path}: {name} makes no model of a seed, or without arguments ({reason})") from error

    return model, getattr(module, "inputs", None)


def _of_configuration(path: Path) -> Any:
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
    return lambda seed: transformers.AutoModel.from_config(config)
