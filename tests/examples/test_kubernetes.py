from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.settings.settings import options
from gateway.web.table import ROUTES

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
KUBERNETES = "1.35"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def deployment() -> dict[str, Any]:
    return next(one for one in documents("podway.yaml") if one["kind"] == "Deployment")


def container() -> dict[str, Any]:
    found: dict[str, Any] = deployment()["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("document", documents("podway.yaml"), ids=lambda one: one["kind"])
def test_a_manifest_is_valid_by_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_validator_rejects_a_field_that_kubernetes_does_not_have() -> None:
    document = deployment()
    document["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_every_selector_selects_the_pods_of_the_deployment() -> None:
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    by_kind = {one["kind"]: one["spec"] for one in documents("podway.yaml") if "spec" in one}
    pool = documents("inference_pool.yaml")[0]
    for selector in (
        by_kind["Service"]["selector"],
        by_kind["Deployment"]["selector"]["matchLabels"],
        by_kind["PodDisruptionBudget"]["selector"]["matchLabels"],
        pool["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels


def test_probes_ask_for_routes_of_the_server_at_the_port_that_it_listens_on() -> None:
    found = container()
    routes = {route.path for route in ROUTES.routes}
    ports = {one["name"]: one["containerPort"] for one in found["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = found[probe]["httpGet"]
        assert request["path"] in routes
        assert ports[request["port"]] == 8000
    pool = documents("inference_pool.yaml")[0]
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]


def test_the_grace_period_is_longer_than_the_drain() -> None:
    found = container()
    environment = {one["name"]: one["value"] for one in found["env"]}
    pause = found["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = deployment()["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > pause + float(environment["PODWAY_DRAIN_SECONDS"])


def test_arguments_and_variables_are_settings_of_the_server() -> None:
    found = container()
    flags = [one[2:].replace("-", "_") for one in found["args"] if one.startswith("--")]
    variables = [one["name"] for one in found["env"] if one["name"].startswith("PODWAY_")]
    names = flags + [one.removeprefix("PODWAY_").lower() for one in variables]
    assert names
    assert set(names) <= {option.name for option in options()}
