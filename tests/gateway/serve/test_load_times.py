from dataclasses import replace
from pathlib import Path

from gateway.groups.group import UNMEASURED_LOAD_SECONDS
from gateway.serve.load_times import LoadTime
from gateway.settings.settings import load


def test_the_seconds_of_a_load_are_the_forecast_after_a_restart(tmp_path: Path) -> None:
    settings = load({"cache_dir": str(tmp_path), "model": "builtin"})
    assert LoadTime(settings).seconds == UNMEASURED_LOAD_SECONDS
    LoadTime(settings).save(3.456)
    assert LoadTime(settings).seconds == 3.46
    other = replace(settings, kernels=replace(settings.kernels, weights="int8"))
    assert LoadTime(other).seconds == UNMEASURED_LOAD_SECONDS
