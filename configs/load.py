"""From YAML and command-line overrides to checked settings, with errors that name key, place and remedy. No torch."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import ServeSettings
from configs.strict_yaml import StrictLoader

BUNDLED = Path(__file__).resolve().parent
"""This package on disk: the YAML files and the demo checkpoint are installed with it."""

PATH_KEYS = (
    *("model.path", "state_dir", "speculation.profile", "access.identities", "access.audit_log"),
    *("server.tls.certificate", "server.tls.key", "server.tls.client_ca"),
    *("operator.tls.certificate", "operator.tls.key", "operator.tls.client_ca"),
    *("cluster.tls.certificate", "cluster.tls.key", "cluster.tls.ca"),
)
"""Paths: relative ones in a YAML file start at that file, relative ones given as overrides at the working directory."""


class SettingsError(ValueError):
    """A setting that cannot be used. The text has one line per problem: place, key path, problem, remedy."""


def demo_checkpoint() -> Path:
    """Directory of the bundled demo model, in a clone and in an installed wheel alike."""
    return BUNDLED / "models" / "demo"


def bundled_files() -> dict[str, Path]:
    """The settings files that are installed with the product, by the name `--config` takes."""
    return {path.stem: path for path in sorted((BUNDLED / "serve").glob("*.yaml"))}


def settings_file(name: str | Path) -> Path:
    """The file that `--config NAME` means: a path, or the bare name of a bundled file; or a folder of files.

    Raises SettingsError where there is none of them.
    """
    path = Path(name)
    if os.path.isfile(path) or (os.path.isdir(path) and files_at(path)):
        return path
    bundled = bundled_files()
    if str(name) in bundled:
        return bundled[str(name)]
    if os.path.isdir(path):
        raise _no_file_in(path)
    raise SettingsError(
        f"{path}: {_why_absent(path)}; give the path of a YAML file or one of the bundled names {', '.join(bundled)}"
    )


def files_at(path: Path) -> tuple[Path, ...]:
    """The settings files that a path stands for: itself, or a folder's .yaml files by name, hidden ones left out (those
    of an editor, and what a Kubernetes volume keeps beside its files). One that cannot be read is among them: whoever
    reads it says why."""
    if not os.path.isdir(path):
        return (path,)
    return tuple(sorted(one for one in path.glob("*.yaml") if not one.name.startswith(".") and not os.path.isdir(one)))


def load_settings(yaml_path: Path | None, overrides: Mapping[str, Any]) -> ServeSettings:
    """Merges defaults, the YAML file and the overrides, the last ones winning, and checks the result.

    yaml_path: a folder stands for its .yaml files together, none of which may give what another gives.
    overrides: dotted key path to value, such as {"server.port": 0}.

    The result always names a checkpoint directory and a served name: where they were left open, the bundled demo and
    the directory's name. Raises SettingsError.
    """
    document: dict[str, Any] = {}
    paths = () if yaml_path is None else files_at(yaml_path)
    if yaml_path is not None and not paths:
        raise _no_file_in(yaml_path)  # else a folder that has lost its files would say: all as by default
    for path in paths:
        part = _read_yaml(path)
        _anchor_paths(part, path)
        _join(document, part, path)
    for key, value in overrides.items():
        _put(document, key, value)
    places = _Places(yaml_path, overrides)
    try:
        settings = ServeSettings.model_validate(document)
    except ValidationError as error:
        raise SettingsError("\n".join(places.explain(problem) for problem in error.errors())) from None
    _check_step(settings, places)
    _check_slices(settings, places)
    return _with_checkpoint(settings, places)


def _check_step(settings: ServeSettings, places: _Places) -> None:
    """A step must hold a verify pass of γ_max drafts and one prompt row beside it, or prompts could starve."""
    key, given = "scheduler.max_step_tokens", settings.scheduler.max_step_tokens
    gamma_max = settings.speculation.gamma_max
    if given < gamma_max + 2:
        raise SettingsError(
            f"{places.of(key)}{key}: {given} rows do not hold a verify pass of {gamma_max} drafts and one prompt row; "
            f"raise it to {gamma_max + 2} or lower speculation.gamma_max"
        )


def _check_slices(settings: ServeSettings, places: _Places) -> None:
    """Every rank of reference numerics adds whole slices."""
    key, given, tp = "model.k_slices", settings.model.k_slices, settings.parallel.tp
    if settings.model.numerics == "reference" and given % tp:
        raise SettingsError(
            f"{places.of(key)}{key}: {given} slices do not divide among parallel.tp {tp} ranks of reference numerics; "
            "give a multiple of it (runs compare equal only where they have the same number)"
        )


def _with_checkpoint(settings: ServeSettings, places: _Places) -> ServeSettings:
    path = settings.model.path or demo_checkpoint()
    if not os.path.isfile(path / "config.json"):
        found = "no config.json in it" if os.path.isdir(path) else "no such directory"
        raise SettingsError(
            f"{places.of('model.path')}model.path: {path}: {found}; name a checkpoint directory in Hugging Face format"
        )
    name = settings.model.served_name or path.resolve().name
    model = settings.model.model_copy(update={"path": path.resolve(), "served_name": name})
    return settings.model_copy(update={"model": model})


def parse_assignment(text: str) -> tuple[str, Any]:
    """`a.b=value`, the value read as YAML, to a dotted key path and a value. Raises SettingsError."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise SettingsError(f"--set {text}: not of the form key.path=value, as in --set cache.page_size=32")
    try:
        return key.strip(), yaml.load(value, Loader=StrictLoader)  # a SafeLoader
    except yaml.YAMLError:
        raise SettingsError(f"--set {text}: the value is not YAML; quote it") from None


class _Places:
    """Knows where each key was given, and puts that and a remedy into the messages."""

    def __init__(self, yaml_path: Path | None, overrides: Mapping[str, Any]) -> None:
        self._yaml_path = yaml_path
        self._overrides = overrides

    def of(self, key: str) -> str:
        """The place a key was set at, as the start of a message."""
        if any(override == key or override.startswith(f"{key}.") for override in self._overrides):
            return "command line: "
        return "" if self._yaml_path is None else f"{self._yaml_path}: "

    def explain(self, problem: Mapping[str, Any]) -> str:
        """One line for one of pydantic's errors."""
        loc = tuple(str(part) for part in problem["loc"])
        key = ".".join(loc)
        if problem["type"] == "extra_forbidden":
            return f"{self.of(key)}{key}: unknown key; {_near(loc)}"
        if problem["type"] in ("model_type", "model_attributes_type"):
            return f"{self.of(key)}{key}: expected a block of keys ({', '.join(_model_at(loc).model_fields)})"
        message = str(problem["msg"]).removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        given = "" if isinstance(problem["input"], dict) else f", not {problem['input']!r}"
        description = _description(loc)
        return f"{self.of(key)}{key}: {message}{given}" + (f" ({description})" if description else "")


def _model_at(loc: tuple[str, ...]) -> type[BaseModel]:
    """The settings model whose fields stand under a key path."""
    model: type[BaseModel] = ServeSettings
    for part in loc:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model


def _description(loc: tuple[str, ...]) -> str:
    field = _model_at(loc[:-1]).model_fields.get(loc[-1]) if loc else None
    return (field.description or "") if field else ""


def _near(loc: tuple[str, ...]) -> str:
    """The remedy for an unknown key: keys that look like it in its block or by its last part anywhere."""
    siblings = list(_model_at(loc[:-1]).model_fields)
    near = [".".join((*loc[:-1], name)) for name in difflib.get_close_matches(loc[-1], siblings, n=3)]
    near += [key for key in key_paths(ServeSettings) if key.split(".")[-1] == loc[-1] and key not in near]
    if near:
        return f"did you mean {' or '.join(near)}?"
    block = f"{'.'.join(loc[:-1])} has" if loc[:-1] else "the top level has"
    return f"{block} {', '.join(siblings)}"


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key path of a settings model that holds a value, in order."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from key_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)  # a SafeLoader
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; give the path of a YAML file that can be read") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not UTF-8 text; save the file as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = f"{error.problem_mark.line + 1}: " if error.problem_mark else " "
        raise SettingsError(f"{path}:{line}{error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise SettingsError(f"{path}: not YAML: too many blocks in each other") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        blocks = ", ".join(ServeSettings.model_fields)
        raise SettingsError(f"{path}: expected a block of keys ({blocks}), found a {type(document).__name__}")
    # An empty block (all its lines commented out) reads as null; it means the block's defaults.
    return {str(key): {} if value is None and _is_block(str(key)) else value for key, value in document.items()}


def _join(document: dict[str, Any], part: dict[str, Any], path: Path, prefix: str = "") -> None:
    """Adds what a file gives to what the files before it give. Raises SettingsError where both give a key: which one
    is meant would hang on their names."""
    for key, value in part.items():
        there = document.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            _join(there, value, path, f"{prefix}{key}.")
        elif key in document:
            raise SettingsError(f"{path}: {prefix}{key}: another file of {path.parent} gives it too; keep one")
        else:
            document[key] = value


def _why_absent(path: Path) -> str:
    try:
        path.stat()
    except PermissionError as error:
        return str(error.strerror)
    except OSError:
        pass
    return "no such file"


def _no_file_in(folder: Path) -> SettingsError:
    return SettingsError(f"{folder}: is a directory without a .yaml file; give the path of a settings file")


def _is_block(key: str) -> bool:
    field = ServeSettings.model_fields.get(key)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _anchor_paths(document: dict[str, Any], path: Path) -> None:
    """path: of the file. Raises SettingsError for a home that is not known here."""
    for key in PATH_KEYS:
        *blocks, name = key.split(".")
        block: Any = document
        for part in blocks:
            block = block.get(part) if isinstance(block, dict) else None
        if isinstance(block, dict) and isinstance(block.get(name), str):
            try:
                block[name] = str(path.parent / Path(block[name]).expanduser())
            except RuntimeError:
                raise SettingsError(f"{path}: {key}: {block[name]}: no such home here; write the path out") from None


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key, making blocks on the way. Raises SettingsError where a value stands in a block's place."""
    *blocks, name = key.split(".")
    block = document
    for depth, part in enumerate(blocks):
        inner = block.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingsError(f"{key}: {'.'.join(blocks[: depth + 1])} holds a value, not a block of keys")
        block = inner
    block[name] = value
