"""Several models: `[models.NAME]` tables of a settings file, or several names on the command line.

A table has the settings of one model, and of what is said outside of it only what differs. Flags
and PODWAY_ variables are for all models.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.errors import StartupError
from gateway.options import Option, split
from gateway.settings.flags import did_you_mean

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
