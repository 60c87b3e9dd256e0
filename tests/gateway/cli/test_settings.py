"""The settings object: the sources of values, and the errors for invalid ones."""

import json
from dataclasses import FrozenInstanceError
from math import inf
from pathlib import Path

import pytest

from engine.control.admission import Admission
from engine.errors import StartupError
from gateway.options import Option
from gateway.serve.command import parser
from gateway.settings.model import BUILTIN_MODEL
from gateway.settings.settings import Settings, load, options


def startup_error(**flags: str) -> str:
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


def test_every_setting_can_be_set_by_flag_environment_and_file(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "model": "m",
        "served_model_name": "n,m",
        "override_generation_config": '{"top_k": 20}',
        "task": "embed",
        "mmproj": "off",
        "lora": "sql=/loras/sql,chat=/loras/chat",
        "max_loras": "3",
        "max_lora_rank": "16",
        "dtype": "float32",
        "weights": "int8",
        "device": "cpu",
        "gpu_memory_utilization": "0.5",
        "attention": "cpu",
        "threads": "2",
        "max_model_len": "100",
        "chat_template": "t.jinja",
        "trust_request_chat_template": "true",
        "tool_dialect": "mistral",
        "reasoning_dialect": "none",
        "kv_cache_dtype": "int8",
        "kv_slots": "64",
        "block_size": "8",
        "prefix_cache": "false",
        "policy": "mlfq",
        "starvation_seconds": "9.5",
        "base_quantum": "0.25",
        "quantum_ratio": "3",
        "num_levels": "4",
        "skip_join": "false",
        "input_weight": "0.5",
        "output_weight": "4",
        "fair_keys": "true",
        "ttft_goal": "2s",
        "admission": "reserve",
        "autoload": "false",
        "pinned": "true",
        "idle_unload": "10m",
        "share": "2",
        "priority": "1",
        "memory": "1GiB",
        "max_load_wait": "5s",
        "max_batch_size": "4",
        "max_batch_tokens": "32",
        "encoder_memory": "64MiB",
        "max_queue_requests": "5",
        "max_queue_tokens": "6",
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
        "cuda_graphs": "false",
        "batch_invariant": "true",
        "lookahead": "1",
        "thread_wait": "sleep",
        "max_restarts": "7",
        "host_kv_memory": "3MiB",
        "disk_kv": "kv",
        "disk_kv_memory": "4MiB",
        "disk_kv_read_ahead": "false",
        "kv_store": "mooncake://10.0.0.1:50051",
        "swap": "reactive",
        "max_step_seconds": "0.25",
        "itl_goal": "50ms",
        "cost_model": "none",
        "prefill_slowdown": "3",
        "background_slowdown": "2",
        "record": "record.jsonl",
        "kv_events_config": '{"enable_kv_cache_events": true}',
        "otlp_endpoint": "http://127.0.0.1:4318",
        "cache_dir": "cache",
        "packed_cache": "off",
        "packed_cache_size": "1GiB",
        "trace": "trace.json",
        "launcher": "ray",
        "replicas": "2",
        "ray_address": "10.0.0.1:6379",
        "pipeline_stages": "2",
        "tensor_ranks": "3",
        "step_seconds": "2.5",
        "host": "::1",
        "port": "0",
        "api_key": "a,b",
        "api_key_file": "keys.toml",
        "admin_api_key": "c",
        "prefix_isolation": "off",
        "allowed_host": "api.example",
        "requests_per_minute": "60",
        "tokens_per_minute": "1000",
        "max_concurrent": "3",
        "page": "false",
        "strict_max_tokens": "true",
        "cors_origin": "https://a.example,https://b.example",
        "tls_cert": "cert.pem",
        "tls_key": "key.pem",
        "max_connections": "99",
        "max_address_connections": "9",
        "media_hosts": "images.example,cdn.example:8443",
        "image_max_tokens": "512",
        "max_images": "5",
        "body_seconds": "7.5",
        "stall_seconds": "70",
        "max_body_bytes": "2MiB",
        "store": "memory",
        "max_file_bytes": "3MiB",
        "max_key_bytes": "4MiB",
        "max_store_bytes": "5MiB",
        "max_key_replay_bytes": "6MiB",
        "max_replay_bytes": "7MiB",
        "replay_seconds": "90",
        "drain_seconds": "1.5",
        "upgrade_seconds": "60",
        "keepalive_whole": "20",
        "unknown_fields": "reject",
        "log_level": "debug",
        "log_format": "json",
    }
    assert values.keys() | {"kv_memory", "config"} == {option.name for option in options()}
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
    assert by_flag.http.max_body_bytes == 2 << 20
    assert by_flag.model.chat_template == Path("t.jinja")


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
        ("thread_wait", "x", "--thread-wait must be one of spin, sleep, not 'x'"),
        ("admission", "x", "--admission must be one of grow, reserve, request, not 'x'"),
        (
            "policy",
            "lifo",
            "--policy must be one of fcfs, mlfq, priority, fair, deadline, not 'lifo'",
        ),
        ("prefix_cache", "maybe", "--prefix-cache must be one of true, false, not 'maybe'"),
        ("drain_seconds", "nan", "--drain-seconds must be a number, at least 0, not 'nan'"),
        ("kv_memory", "2 cows", "--kv-memory must be a size such as 512MiB or 2GiB, not '2 cows'"),
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
    monkeypatch.setenv("PODWAY_PORT", "tcp://10.0.0.1:80")
    assert startup_error(block_size="16").endswith("not 'tcp://10.0.0.1:80' (from PODWAY_PORT)")


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


def test_a_switch_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PODWAY_PREFIX_CACHE", "false")
    assert load({}).scheduler.reuses_prefixes is False
    assert load({"prefix_cache": True}).scheduler.reuses_prefixes is True


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
