"""The one settings object: flags, PODWAY_* variables and TOML files all fill it.

Precedence: flags > environment > `--config FILE` > `podway.toml` here > defaults. This is the
only place that reads the environment. A wrong value is rejected in one line that names the flag,
where the value came from and what is allowed.

Several models: `[models.NAME]` tables of a settings file, or several names on the command line.

A table has the settings of one model, and of what is said outside of it only what differs. Flags
and PODWAY_ variables are for all models.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from engine.control.settings import SchedulerSettings
from engine.errors import StartupError
from engine.policy import PolicySettings
from engine.transport.multiprocess import MultiprocessSettings
from engine.worker_settings import Kernels, KVSettings, Tiers
from gateway.groups.terms import ServerTerms, Terms
from gateway.options import PREFIX, Option, options_of, split, with_values
from gateway.settings.flags import did_you_mean
from gateway.settings.model import (
    ImageSettings,
    LaunchSettings,
    LoraSettings,
    ModelSettings,
    ScheduleSettings,
)
from gateway.settings.server import (
    LOCAL_FILE,
    AccessSettings,
    HttpSettings,
    ObserveSettings,
    ReplaySettings,
    StoreSettings,
)

TABLES = "models"
# Parts of the settings that every model has for itself.
OWN_SECTIONS = (
    *("model", "loras", "kernels", "kv", "tiers", "schedule", "scheduler", "policies", "workers"),
    *("launch", "terms", "images"),
)


class Given(NamedTuple):
    """A value of a setting, and where it is from: "" for a flag."""

    value: object
    origin: str = ""


Values = dict[str, Given]


def tables_of(given: Values, known: Mapping[str, Option]) -> dict[str, Values]:
    """The tables `[models.NAME]`, which are taken out of what a file has. Raises `StartupError`."""
    models = given.pop(TABLES, None)
    if models is None:
        return {}
    if not isinstance(models.value, dict) or not models.value:
        raise StartupError(f"models must be tables [models.NAME] (from {models.origin})")
    own = {name: option for name, option in known.items() if option.section in OWN_SECTIONS}
    return {
        name: _table(name, values, models.origin, own, known)
        for name, values in models.value.items()
    }


def _table(
    name: str, values: object, origin: str, own: Mapping[str, Option], known: Mapping[str, Option]
) -> Values:
    label = f"[models.{name}]"
    if not name or not isinstance(values, dict):
        raise StartupError(f"{label} must be a table (from {origin})")
    if split(name) != (name,):
        raise StartupError(
            f"{label}: a name has no comma, which separates names, and no white space around it"
        )
    given = {
        key.replace("-", "_"): Given(value, f"{label} in {origin}") for key, value in values.items()
    }
    for key in given:
        if key not in known:
            raise StartupError(f"unknown setting {key!r} in {label}{did_you_mean(key, own)}")
        if key not in own:
            raise StartupError(
                f"{key!r} in {label} is a setting of the server: write it outside of the table"
            )
    if "model" not in given:
        raise StartupError(f"{label} needs 'model', the directory or the id of the model")
    further = given.get("served_model_name", Given(()))
    aliases = (
        further.value if isinstance(further.value, list | tuple) else str(further.value).split(",")
    )
    given["served_model_name"] = Given((name, *aliases), further.origin or given["model"].origin)
    return given


def chosen_models(
    tables: Mapping[str, Values], base: Values, names: Sequence[str]
) -> Sequence[Values]:
    """The values of each model that is served, none if there is one model and no table: the tables
    that `names`, from the command line, choose, and models that they name besides; without names,
    all tables. Raises `StartupError`."""
    if not names and tables and "model" in base:
        origin = base["model"].origin
        raise StartupError(f"'model' (from {origin}) is beside [models.NAME] tables: make it one")
    chosen = names or tuple(tables)
    if len(set(chosen)) < len(chosen):
        raise StartupError(f"a model is named twice: {', '.join(chosen)}")
    if len(chosen) == 1 and chosen[0] not in tables:
        return ()
    return [tables.get(name, {"model": Given(name)}) for name in chosen]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of `podway serve`, by the part that uses them, with the defaults of a server.

    Durations are seconds, sizes are bytes. `scheduler.max_model_len` is known once the model is
    loaded; until then it is 0.
    """

    model: ModelSettings = ModelSettings()
    images: ImageSettings = ImageSettings()
    loras: LoraSettings = LoraSettings()
    kernels: Kernels = Kernels()
    kv: KVSettings = KVSettings()
    tiers: Tiers = Tiers()
    schedule: ScheduleSettings = ScheduleSettings()
    scheduler: SchedulerSettings = SchedulerSettings(
        max_model_len=0, max_step_seconds=0.5, max_prefill_slowdown=2.0, max_background_slowdown=1.5
    )
    policies: PolicySettings = PolicySettings()
    workers: MultiprocessSettings = MultiprocessSettings()
    launch: LaunchSettings = LaunchSettings()
    http: HttpSettings = HttpSettings()
    store: StoreSettings = StoreSettings()
    replay: ReplaySettings = ReplaySettings()
    observe: ObserveSettings = ObserveSettings()
    access: AccessSettings = AccessSettings()
    terms: Terms = Terms()
    server_terms: ServerTerms = ServerTerms()
    models: "tuple[Settings, ...]" = ()  # those of each model, if the server has several

    @property
    def deployments(self) -> "tuple[Settings, ...]":
        """The settings of each model."""
        return self.models or (self,)

    def __post_init__(self) -> None:
        if self.launch.launcher == "ray" and self.kernels.device.startswith("cuda:"):
            raise ValueError(
                "--launcher ray lets Ray choose the GPUs: --device must be auto, cpu or cuda, not "
                f"{self.kernels.device!r}"
            )


def options() -> tuple[Option, ...]:
    """All settings in the order of the help."""
    defaults = Settings()
    return tuple(
        option
        for section in fields(Settings)
        if section.name != "models"
        for option in options_of(section.name, getattr(defaults, section.name))
    )


def load(flags: Mapping[str, object]) -> Settings:
    """The settings of this run. `flags` maps setting names to the command line's values: strings,
    booleans for switches, and lists for flags that can be repeated, and for the models.

    Raises `StartupError` with one line that names the first wrong setting. A PODWAY_ variable that
    resembles a setting's is an error; any other unknown one, for instance of a Kubernetes service
    named podway, is ignored.
    """
    known = {option.name: option for option in options()}
    _check_variables(os.environ, known)
    in_flags = {name: Given(value) for name, value in flags.items()}
    in_environment = {
        name: Given(text, option.env)
        for name, option in known.items()
        if (text := os.environ.get(option.env))
    }
    config = (in_environment | in_flags).get("config")
    given = {name: each for path in _files(config) for name, each in _read(path).items()}
    tables, above = tables_of(given, known), in_environment | in_flags
    for name in given.keys() & above.keys() & known.keys():
        _parsed(known[name], given[name])  # a wrong value is an error also where a flag replaces it
    models = above.pop("model", Given(()))
    names = _names(models.value)
    chosen = chosen_models(tables, given, names)
    if not chosen:
        only = {"model": models._replace(value=names[0])} if names else {}
        return _built(known, given | above | only)
    if "served_model_name" in given | above:
        raise StartupError("--served-model-name is for one model: name several in their tables")
    server = _built(known, given | above)
    return replace(server, models=tuple(_built(known, given | own | above) for own in chosen))


def _names(value: object) -> Sequence[str]:
    """The models that the command line or a variable names."""
    return tuple(value) if isinstance(value, list | tuple) else (str(value),)


def _built(known: Mapping[str, Option], given: Mapping[str, Given]) -> Settings:
    """The defaults with the values that are given."""
    for name, (_, origin) in given.items():
        if name not in known:
            where = f" in {origin}" if origin else ""
            raise StartupError(f"unknown setting {name!r}{where}{did_you_mean(name, known)}")
    values: dict[str, dict[str, object]] = {}
    for name, option in known.items():
        if name in given:
            values.setdefault(option.section, {})[option.field] = _parsed(option, given[name])
    defaults = Settings()
    try:
        sections = {name: with_values(getattr(defaults, name), own) for name, own in values.items()}
        return with_values(defaults, sections)
    except ValueError as error:
        raise StartupError(str(error)) from None


def _parsed(option: Option, given: Given) -> object:
    try:
        return option.parse(given.value)
    except ValueError as error:
        origin = f" (from {given.origin})" if given.origin else ""
        raise StartupError(f"{error}{origin}") from None


def _check_variables(variables: Iterable[str], known: Mapping[str, Option]) -> None:
    names = [name.upper() for name in known]
    for variable in variables:
        name = variable.removeprefix(PREFIX)
        if not variable.startswith(PREFIX) or name in names:
            continue
        if nearest := get_close_matches(name, names, n=1, cutoff=0.75):
            raise StartupError(f"unknown variable {variable}; did you mean {PREFIX}{nearest[0]}?")


def _files(config: Given | None) -> list[Path]:
    """The settings files, in which a later one overrides an earlier one."""
    named = [] if config is None else [Path(str(config.value))]
    return [LOCAL_FILE, *named] if LOCAL_FILE.is_file() else named


def _read(path: Path) -> dict[str, Given]:
    """The settings in one TOML file; names may be written with dashes, as flags are."""
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read the settings file {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the settings file {path} is not TOML: {error}") from None
    return {
        key.replace("-", "_"): Given(value, f"{path}{'' if key == TABLES else _line_of(key, text)}")
        for key, value in table.items()
    }


def _line_of(key: str, text: str) -> str:
    """`, line 4`, where a file sets the key; "" if the key is written in another way."""
    places = re.finditer(rf"^[ \t]*\[?[ \t]*[\"']?{re.escape(key)}\b[\"']?[ \t]*[=.\]]", text, re.M)
    place = next(places, None)
    return "" if place is None else f", line {text.count(chr(10), 0, place.start()) + 1}"
