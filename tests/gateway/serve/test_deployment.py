import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.serve.command import VLLM_FLAGS, parser
from gateway.serve.tls import Certificate
from gateway.settings.settings import load, options
from tests.certificates import make_certificate
from tests.gateway.rig import Setting
from tests.gateway.serve.live import listening

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def instructions(name: str) -> list[str]:
    """The arguments of all instructions of this name, continued lines joined."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def health_check() -> list[str]:
    (found,) = instructions("HEALTHCHECK")
    _, command, *rest = json.loads(found.partition("CMD")[2])
    return [sys.executable, command, *rest]


@pytest.mark.parametrize("is_tls", [False, True])
def test_the_health_check_follows_port_and_tls(tmp_path: Path, is_tls: bool) -> None:
    files = make_certificate(tmp_path, "one")
    tls = Certificate(*files).context if is_tls else None
    with listening(Setting(step=0.001), tls=tls) as live:
        env = {"PODWAY_PORT": str(live.port)} | ({"PODWAY_TLS_CERT": "c"} if is_tls else {})
        checked = subprocess.run(health_check(), env=env, capture_output=True)
        assert checked.returncode == 0, checked.stderr
    gone = subprocess.run(health_check(), env=env, capture_output=True)
    assert gone.returncode != 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    page = (ROOT / "gateway" / "OPERATIONS.md").read_text()
    (unit,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "podway.service"
    path.write_text(unit.replace("/opt/podway/bin/podway", sys.executable))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("extras", ["", "cuda", "cuda,ray"])
def test_the_image_installs_the_dependencies_before_the_sources(extras: str) -> None:
    runs = instructions("RUN")
    listing = next(run for run in runs if "tomllib" in run).partition(" > ")[0]
    listing = listing.replace("python -c", f"{sys.executable} -c")
    listed = subprocess.run(
        listing, shell=True, cwd=ROOT, env=os.environ | {"EXTRAS": extras},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [
        each
        for extra in filter(None, extras.split(","))
        for each in project["optional-dependencies"][extra]
    ]
    assert listed.stdout.splitlines() == [*project["dependencies"], *optional]
    order = [
        DOCKERFILE.index(text) for text in ("-r requirements.txt", "COPY gateway", "--no-deps")
    ]
    assert order == sorted(order)


def compose(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return loaded


def scraped() -> str:
    """The address that Prometheus scrapes."""
    text = (ROOT / "examples" / "observability" / "prometheus.yml").read_text()
    target: str = yaml.safe_load(text)["scrape_configs"][0]["static_configs"][0]["targets"][0]
    return target


def test_the_compose_files_fit_the_dockerfile() -> None:
    arguments = {each.partition("=")[0] for each in instructions("ARG")}
    main, secrets = compose("compose.yaml"), compose("compose.secrets.yaml")
    for name in ("gateway", "gateway-gpu"):
        service = main["services"][name]
        assert set(service["build"]["args"]) <= arguments
        for volume in service["volumes"][:3]:
            source, target = volume.split(":")
            assert source in main["volumes"]
            assert f"{target}" in DOCKERFILE
        assert set(secrets["services"][name]["secrets"]) == set(secrets["secrets"])
        assert service["env_file"] == [{"path": "podway.env", "required": False}]
    host, _, port = scraped().partition(":")
    gpu = main["services"]["gateway-gpu"]
    assert host == "gateway" == gpu["networks"]["default"]["aliases"][0]
    assert port == "8000"
    page = (ROOT / "gateway" / "OPERATIONS.md").read_text()
    assert set(re.findall(r"docker compose exec (\S+) podway", page)) == {"gateway"}
    names = {option.env for option in options()}
    used = re.findall(r"PODWAY_[A-Z_]+", (ROOT / "compose.yaml").read_text() + DOCKERFILE)
    used += re.findall(r"^ +(PODWAY_[A-Z_]+):", (ROOT / "compose.secrets.yaml").read_text(), re.M)
    assert set(used) - {"PODWAY_"} <= names


@pytest.mark.parametrize("name", ["compose.yaml", "compose.secrets.yaml"])
def test_the_compose_files_follow_the_specification(name: str) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run([*command, str(ROOT / name)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("service", ["gateway", "gateway-gpu"])
def test_the_server_accepts_what_a_service_starts_it_with(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = compose("compose.yaml")["services"][service]
    secrets = compose("compose.secrets.yaml")["services"][service]
    (entry,) = instructions("ENTRYPOINT")
    given = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", each) for each in described["command"]]
    assert (json.loads(entry), given[0]) == (["podway"], "serve")
    for key, value in (described["environment"] | secrets["environment"]).items():
        monkeypatch.setenv(key, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    flags = vars(parser().parse_args(given[1:]))
    settings = load({name: value for name, value in flags.items() if value is not None})
    assert settings.deployments[0].model.source == "builtin"
    assert settings.http.port == 8000
    assert settings.access.api_key_file == Path("/run/secrets/keys.toml")
    assert settings.http.drain_seconds < int(described["stop_grace_period"].removesuffix("s"))


def test_the_flags_of_the_operations_page_exist() -> None:
    page = (ROOT / "gateway" / "OPERATIONS.md").read_text()
    table = page[page.index("| vLLM | Podway |") :].splitlines()[2:]
    flags = {option.flag for option in options()}
    flags |= {option.flag.replace("--", "--no-", 1) for option in options() if option.is_switch}
    named = {flag for row in table for flag in re.findall(r"`(--[a-z-]+)", row.split("|")[2])}
    assert len(named) > 20
    assert named <= flags
    for row in table:
        theirs, ours = (re.findall(r"`(--?[a-z-]+)", cell) for cell in row.split("|")[1:3])
        for flag in set(theirs) - flags:
            assert VLLM_FLAGS[flag] in ours or not ours, flag
    text = page[: page.index("## vLLM's flags")]
    assert {flag for flag in re.findall(r"`(--[a-z-]+)", text) if flag != "--profile"} <= flags
