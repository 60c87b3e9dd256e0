import json
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from math import inf
from pathlib import Path

import pytest

from adapters.dialects.choosing import REASONING_MARKS, TOOL_STYLES
from engine.control.admission import Admission
from engine.errors import StartupError
from gateway.options import Option
from gateway.serve.command import parser
from gateway.settings.model import BUILTIN_MODEL
from gateway.settings.settings import Settings, load, options


def startup_error(**flags: object) -> str:
    with pytest.raises(StartupError) as failed:
        load(flags)
    line = str(failed.value)
    assert "\n" not in line
    return line


def test_by_default_the_builtin_model_is_served_on_loopback() -> None:
    settings = load({})
    assert settings.model.source == BUILTIN_MODEL
    assert (settings.http.host, settings.http.port) == ("127.0.0.1", 8000)
    assert (settings.schedule.policy, settings.scheduler.admission) == ("fcfs", Admission.GROW)


def test_flags_override_environment_then_named_file_then_local_file_then_defaults(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "podway.toml").write_text(
        "port = 1\nmax-batch-size = 1\nblock_size = 1\nlog_level = 'error'\nthreads = 3"
    )
    (bare / "named.toml").write_text("port = 2\nmax-batch-size = 2\nblock_size = 2")
    monkeypatch.setenv("PODWAY_PORT", "3")
    monkeypatch.setenv("PODWAY_MAX_BATCH_SIZE", "4")
    settings = load({"config": "named.toml", "port": "5", "log_level": "warning"})
    assert settings.http.port == 5
    assert settings.scheduler.max_batch_size == 4
    assert settings.kv.block_size == 2
    assert settings.kernels.threads == 3
    assert settings.observe.log_level == "warning"
    assert settings.scheduler.max_batch_tokens == Settings().scheduler.max_batch_tokens


def test_the_file_may_be_named_in_the_environment(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "named.toml").write_text("port = 2")
    monkeypatch.setenv("PODWAY_CONFIG", "named.toml")
    assert load({}).http.port == 2


VALUES = {  # by the placeholder in the help, or by name
    **dict.fromkeys(("N", "RANK", "R", "S", "X", "W", "FACTOR", "SHARE"), "3"),
    **dict.fromkeys(("FILE", "DIR", "HOST", "HOSTS", "NAMES", "ADDRESS", "MODEL"), "some.example"),
    "TOKENS": "1000",
    "SECONDS": "9.5",
    "SIZE": "3MiB",
    "DURATION": "50ms",
    "FRACTION": "0.5",
    "PORT": "0",
    "DEVICE": "cpu",
    "NAME": "none",
    "KEYS": "a,b",
    "NAME=PATH": "sql=/loras/sql",
    "ORIGINS": "https://a.example,https://b.example",
    "attention": "cpu",
    "policy": "mlfq",
    "otlp_endpoint": "http://127.0.0.1:4318",
    "kv_store": "mooncake://10.0.0.1:50051",
    "override_generation_config": '{"top_k": 20}',
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
    "kv_events_config": '{"enable_kv_cache_events": true}',
}


def value_of(option: Option) -> str:
    """A valid value that is not the default."""
    others = [choice for choice in option.choices or () if choice != option.default_text]
    return others[-1] if others else VALUES.get(option.name) or VALUES[option.metavar]


def test_every_setting_can_be_set_by_flag_environment_and_file(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded = ("kv_memory", "config")
    values = {each.name: value_of(each) for each in options() if each.name not in excluded}
    by_flag = load(values)
    (bare / "podway.toml").write_text(
        "\n".join(f"{key} = {json.dumps(values[key])}" for key in values)
    )
    assert load({}) == by_flag
    (bare / "podway.toml").unlink()
    for key, value in values.items():
        monkeypatch.setenv(f"PODWAY_{key.upper()}", value)
    assert load({}) == by_flag
    assert by_flag.access.api_key == ("a", "b")
    assert by_flag.http.cors_origin == ("https://a.example", "https://b.example")
    assert by_flag.http.max_body_bytes == 3 << 20
    assert by_flag.model.chat_template == Path("some.example")


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1GB", 10**9), ("4096", 4096)]
)
def test_memory_sizes_have_units(text: str, size: int) -> None:
    assert load({"kv_memory": text}).kv.kv_memory == size


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", "http", "--port must be a whole number from 0 to 65535, not 'http'"),
        ("port", "65536", "--port must be a whole number from 0 to 65535, not '65536'"),
        ("threads", "1.5", "--threads must be a whole number from 0 to 1024, not '1.5'"),
        ("max_batch_size", "0", "--max-batch-size must be a whole number from 1 to 65536, not '0'"),
        (
            "prefill_slowdown",
            "0.5",
            "--prefill-slowdown must be above 1, or 0 for no limit, not 0.5",
        ),
        ("device", "tpu", "--device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        ("device", "cuda:x", "--device must be auto, cpu, cuda or cuda:N, not 'cuda:x'"),
        (
            "gpu_memory_utilization",
            "1.5",
            "--gpu-memory-utilization must be a number above 0, at most 1, not '1.5'",
        ),
        ("dtype", "int4", "--dtype must be one of auto, float32, bfloat16, float16, not 'int4'"),
        ("lookahead", "2", "--lookahead must be one of auto, 0, 1, not '2'"),
        ("admission", "x", "--admission must be one of grow, reserve, request, not 'x'"),
        (
            "policy",
            "lifo",
            "--policy must be one of fcfs, mlfq, priority, fair, deadline, not 'lifo'",
        ),
        ("prefix_cache", "maybe", "--prefix-cache must be one of true, false, not 'maybe'"),
        ("drain_seconds", "nan", "--drain-seconds must be a number, at least 0, not 'nan'"),
        ("kv_memory", "2 cows", "--kv-memory must be a size such as 512MiB or 2GiB, not '2 cows'"),
        ("api_key", "a,", "--api-key has an empty value; several are separated by commas"),
        ("record", "a\0b", "--record must be text, not 'a\\x00b'"),
        ("model", " ", "MODEL is empty; it must be builtin, a directory, a GGUF file or a hub id"),
    ],
)
def test_an_invalid_value_names_the_flag_and_the_allowed_values(
    name: str, value: str, says: str
) -> None:
    assert startup_error(**{name: value}) == says


def test_an_invalid_value_names_the_variable_or_file_that_it_is_from(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "podway.toml").write_text("port = 1\nblock_size = 'big'")
    line = (
        "--block-size must be a whole number from 1 to 4096, not 'big' (from podway.toml, line 2)"
    )
    assert startup_error() == line
    (bare / "podway.toml").write_text("override_generation_config = 2026-01-01")
    assert startup_error().startswith("--override-generation-config must be a JSON object")
    (bare / "podway.toml").write_text("port = true")
    assert startup_error() == (
        "--port must be a whole number from 0 to 65535, not True (from podway.toml, line 1)"
    )
    wrong = "must be a whole number from 0 to 65535, not True (from podway.toml, line 1)"
    assert startup_error(port="8000") == f"--port {wrong}", "also where a flag replaces it"
    (bare / "podway.toml").write_text("[model]\npath = 'm'")
    assert startup_error(model=["other"]).endswith("not {'path': 'm'} (from podway.toml, line 1)")
    tables = "[models.a]\nmodel = 'a'\n[models.b]\nmodel = 'b'\nblock_size = 'big'"
    (bare / "podway.toml").write_text(tables)
    assert startup_error().endswith("not 'big' (from [models.b] in podway.toml)")
    (bare / "podway.toml").unlink()
    monkeypatch.setenv("PODWAY_PORT", "tcp://10.0.0.1:80")
    assert startup_error(block_size="16").endswith("not 'tcp://10.0.0.1:80' (from PODWAY_PORT)")


@pytest.mark.parametrize("value", [12345, ["12345", 6], {"a": "12345"}, "a=12345\0"])
@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "otlp_endpoint"])
def test_an_error_does_not_show_a_secret(name: str, value: object) -> None:
    flag = "--" + name.replace("_", "-")
    assert startup_error(**{name: value}) == f"{flag} must be text"


@pytest.mark.parametrize(
    ("flags", "is_on"), [([], True), (["--prefix-cache"], True), (["--no-prefix-cache"], False)]
)
def test_a_switch_takes_no_value(flags: list[str], is_on: bool) -> None:
    values = vars(parser().parse_args(flags))
    assert (
        load({k: v for k, v in values.items() if v is not None}).scheduler.reuses_prefixes is is_on
    )


@pytest.mark.parametrize(
    "option", [option for option in options() if option.has_several], ids=lambda each: each.name
)
def test_a_repeated_flag_adds_values(option: Option) -> None:
    flags = [option.flag, "one=a", option.flag, "two=b,three=c"]
    assert vars(parser().parse_args(flags))[option.name] == ["one=a", "two=b,three=c"]
    assert option.default == ()


def test_api_keys_of_a_repeated_flag_are_all_valid() -> None:
    values = vars(parser().parse_args(["--api-key", "a", "--api-key", "b, ops=c"]))
    assert load({"api_key": values["api_key"]}).access.api_key == ("a", "b", "ops=c")


def test_an_empty_list_in_a_file_is_no_value(bare: Path) -> None:
    (bare / "podway.toml").write_text("api_key = []\ncors_origin = []")
    settings = load({})
    assert (settings.access.api_key, settings.http.cors_origin) == ((), ())


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PODWAY_PROT", "PODWAY_PORT"),
        ("PODWAY_MAX_BATCHSIZE", "PODWAY_MAX_BATCH_SIZE"),
        ("PODWAY_API_KEYS", "PODWAY_API_KEY"),
    ],
)
def test_a_misspelled_variable_is_rejected_with_the_nearest_name(
    variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert startup_error() == f"unknown variable {variable}; did you mean {nearest}?"


@pytest.mark.parametrize(
    "variable", ["PODWAY_SERVICE_HOST", "PODWAY_SERVICE_PORT_HTTP", "PODWAY_PORT_8000_TCP_PROTO"]
)
def test_variables_of_a_kubernetes_service_are_ignored(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "10.0.0.1")
    load({})


def test_settings_that_contradict_each_other_are_rejected() -> None:
    assert startup_error(launcher="ray", device="cuda:1").startswith(
        "--launcher ray lets Ray choose the GPUs"
    )
    assert startup_error(kv_slots="64", kv_memory="1GiB").startswith(
        "--kv-slots and --kv-memory exclude"
    )
    line = startup_error(max_batch_size="64", max_batch_tokens="63")
    assert line.startswith("--max-batch-tokens (63) must be at least --max-batch-size (64)")


def test_a_settings_file_that_cannot_be_read_is_named(bare: Path) -> None:
    assert startup_error(config="none.toml").endswith("none.toml: No such file or directory")
    (bare / "bad.toml").write_text("port = ")
    assert "bad.toml is not TOML" in startup_error(config="bad.toml")
    (bare / "latin.toml").write_bytes(b"host = '\xe9'")
    assert startup_error(config="latin.toml").endswith("latin.toml: it is not UTF-8 text")
    (bare / "typo.toml").write_text("prot = 1")
    assert startup_error(config="typo.toml") == (
        "unknown setting 'prot' in typo.toml, line 1; did you mean port?"
    )


def test_settings_are_immutable_and_hide_api_keys() -> None:
    settings = load({"api_key": "secret"})
    with pytest.raises(FrozenInstanceError):
        settings.access.api_key = ()  # type: ignore[misc]
    assert "secret" not in repr(settings)


def test_every_option_has_a_help_text() -> None:
    for option in options():
        assert option.declared.help
        assert option.metavar or option.choices
        assert option.flag == "--" + option.name.replace("_", "-")


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("0.2s", 0.2), ("0.05", 0.05), ("0", inf), (" 1s ", 1.0)]
)
def test_an_itl_goal_is_a_duration(text: str, seconds: float) -> None:
    assert load({"itl_goal": text}).scheduler.itl_goal == seconds


@pytest.mark.parametrize("text", ["fast", "50 minutes", "-1ms", "ms"])
def test_a_wrong_duration_is_rejected(text: str) -> None:
    assert startup_error(itl_goal=text) == (
        f"--itl-goal must be a duration such as 50ms or 0.05s; 0 for none, not {text!r}"
    )


@pytest.mark.parametrize(
    ("name", "known"), [("tool_dialect", TOOL_STYLES), ("reasoning_dialect", REASONING_MARKS)]
)
def test_the_help_names_every_dialect(name: str, known: Mapping[str, object]) -> None:
    (shown,) = (option.declared.help for option in options() if option.name == name)
    assert {*known, "auto", "none"} <= set(re.findall(r"[\w-]+", shown))
