import json
from functools import partial
from pathlib import Path

import pytest

from engine.policy import PolicySettings
from gateway.commands.plan.command import main as plan
from gateway.commands.simulate.command import main, parser
from gateway.commands.simulate.setups import read_cost, setups

pytestmark = pytest.mark.usefixtures("quick_plots")
AZURE = Path(__file__).parents[2] / "data" / "azure_2023_conv_first_1000.csv.gz"
GOLDEN = Path(__file__).parents[2] / "replays" / "fcfs_grow.jsonl"
SMALL = ["-n", "20", "--device", "a100-40gb", "--model", "gpt3-13b"]


def simulated(tmp_path: Path, *flags: str) -> dict[str, list[dict[str, object]]]:
    path = tmp_path / "figures.json"
    assert main([*flags, "--json", str(path)]) == 0
    written: dict[str, list[dict[str, object]]] = json.loads(path.read_text())
    return written


def test_every_policy_runs_at_every_load(tmp_path: Path) -> None:
    plot = tmp_path / "load.png"
    flags = ["--policy", "fcfs", "srpt", "--admission", "grow", "request", "--rate", "1", "4"]
    runs = simulated(tmp_path, *SMALL, *flags, "--plot", str(plot))["runs"]
    assert [run["label"] for run in runs[::2]] == [
        "fcfs grow",
        "fcfs request",
        "srpt grow",
        "srpt request",
    ]
    assert [run["offered"] for run in runs[:2]] == pytest.approx([1.0, 4.0])
    assert all(run["num_finished"] == 20 for run in runs)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_part_of_a_trace_runs_at_its_own_pace(tmp_path: Path) -> None:
    plot = tmp_path / "time.png"
    flags = ["--trace", str(AZURE), "--from", "2", "--to", "9", "--plot", str(plot)]
    (run,) = simulated(tmp_path, *flags)["runs"]
    assert 0 < int(str(run["num_finished"])) < 200
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "steady"])
def test_each_synthetic_load_finishes(tmp_path: Path, arrivals: str) -> None:
    flags = ["--arrivals", arrivals, "--lengths", "skewed", "--rate", "3"]
    (run,) = simulated(tmp_path, *SMALL, *flags)["runs"]
    assert run["num_finished"] == 20


def test_capacity_is_the_highest_rate_within_the_slo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--capacity", "--slo", "norm=0.1", "--share", "0.95", "--rate", "2"]
    written = simulated(tmp_path, *SMALL, *flags)
    capacity: object = written["capacity"]
    assert isinstance(capacity, dict)
    (rate,) = capacity.values()
    assert isinstance(rate, float)
    assert rate > 0.5
    assert "with 95% within the SLO" in capsys.readouterr().out


def test_a_measured_cost_and_a_described_device_are_read(tmp_path: Path) -> None:
    cost, device = tmp_path / "cost.json", tmp_path / "device.json"
    cost.write_text('{"curve": [[0, 0.5], [100, 0.5]], "per_slot": 0, "per_pair": 0}')
    assert read_cost(cost).compute(7, 3) == 0.5
    device.write_text(
        '{"name": "x", "flops": 1e14, "bandwidth": 1e12, "memory": 8e10, "link": 1, "network": 1}'
    )
    flags = ["-n", "2", "--rate", "0.001", "--cost", str(cost), "--kv-slots", "4096"]
    (run,) = simulated(tmp_path, *flags)["runs"]
    assert run["spreads"]["ttft"]["p50"] == 0.5  # type: ignore[index]
    assert simulated(tmp_path, "-n", "5", "--device", str(device))["runs"][0]["num_finished"] == 5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--device", "abacus"], "--device must be a .json file or one of"),
        (["--device", "a100-40g"], "did you mean a100-40gb?"),
        (["--device", "l4", "--model", "gpt3-175b"], "does not fit on 1 × l4"),
        (["--capacity"], "--capacity requires --slo"),
        (["--max-batch-tokens", "8"], "--max-batch-tokens (8) must be at least"),
        (["-n", "1", "--rate", "2"], "requests at different times"),
        (["--cost", "nowhere.json"], "nowhere.json"),
        (["--replay", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--replay", str(AZURE)], "is not a recording"),
        (["--replay", str(GOLDEN), "--trace", str(AZURE)], "cannot be combined"),
        (
            ["--capacity", "--slo", "norm=100", "-n", "2", "--rate", "1"],
            "2 requests are so few that they keep the SLO even if all arrive at once",
        ),
    ],
)
def test_flags_that_cannot_be_simulated_are_rejected_in_one_line(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--slo", "speed=1"], ["--policy", "magic"], ["--share", "2"]])
def test_an_invalid_flag_is_named_in_the_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 1
    assert flags[0] in capsys.readouterr().err


def test_a_recording_is_replayed_under_its_own_and_other_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--replay", str(GOLDEN), "--slo", "ttft=9"]
    own = simulated(tmp_path, *flags)["runs"]
    assert [run["label"] for run in own] == ["recorded", "fcfs grow"]
    assert "the schedule is reproduced:" in capsys.readouterr().out
    other = ["--policy", "mlfq", "srpt", "--admission", "reserve", "--max-batch-size", "2"]
    runs = simulated(tmp_path, *flags, *other)["runs"]
    assert [run["label"] for run in runs] == ["recorded", "mlfq reserve", "srpt reserve"]
    assert runs[0] == own[0]
    assert len({run["num_arrived"] for run in runs}) == 1


def test_a_recording_that_is_not_reproduced_says_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.jsonl"
    lines = GOLDEN.read_text().splitlines()
    path.write_text("\n".join([*lines[:30], *lines[31:]]))
    runs = simulated(tmp_path, "--replay", str(path))["runs"]
    assert [run["label"] for run in runs] == ["fcfs grow"]
    assert "the schedule differs after" in capsys.readouterr().err


def test_a_setting_that_is_out_of_range_is_rejected_as_the_server_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--quantum-ratio", "1"])
    assert "--quantum-ratio: must be a number above 1, not '1'" in capsys.readouterr().err


def test_settings_of_policies_are_flags() -> None:
    flags = ["--starvation-seconds", "3", "--base-quantum", "0.5", "--quantum-ratio", "4"]
    flags += ["--num-levels", "5", "--no-skip-join", "--input-weight", "2", "--output-weight", "7"]
    flags += ["--fair-keys", "--ttft-goal", "2s"]
    (setup,) = setups(parser().parse_args([*flags, "--max-batch-size", "8"]), None)
    assert isinstance(setup.policy, partial)
    assert setup.policy.args[1] == PolicySettings(
        starvation_seconds=3.0,
        seats=8,
        base_quantum=0.5,
        ratio=4.0,
        num_levels=5,
        skips=False,
        input_weight=2.0,
        output_weight=7.0,
        fair_keys=True,
        ttft_goal=2.0,
    )


FLEET = ["--trace", str(AZURE), "--to", "20", "--device", "l4", "--processes", "1"]


def test_a_fleet_runs_behind_each_router(tmp_path: Path) -> None:
    plot = tmp_path / "fleet.png"
    flags = ["--replicas", "3", "--router", "round-robin", "forecast", "--plot", str(plot)]
    runs = simulated(tmp_path, *FLEET, *flags)["runs"]
    labels = [run["label"] for run in runs]
    assert labels == ["round-robin × fcfs grow", "forecast × fcfs grow"]
    assert all(run["num_finished"] == run["num_arrived"] for run in runs)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_copies_of_a_trace_are_a_larger_load(tmp_path: Path) -> None:
    (one,) = simulated(tmp_path, *FLEET, "--replicas", "4")["runs"]
    (three,) = simulated(tmp_path, *FLEET, "--replicas", "4", "--copies", "3")["runs"]
    assert three["num_arrived"] == 3 * int(str(one["num_arrived"]))


def test_a_single_replica_has_flags_that_a_fleet_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FLEET, "--replicas", "2", "--replay", str(GOLDEN)]) == 1
    assert main([*FLEET, "--replicas", "2", "--capacity", "--slo", "ttft=1"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert "--replay and --trace cannot be combined" in errors[0]
    assert "are for a single replica" in errors[1]


def test_a_plan_names_the_fewest_gpus_that_meet_the_goals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, plot = tmp_path / "plan.json", tmp_path / "plan.png"
    goal = ["--goal", "ttft.p99=1.5,itl.p99=0.5", "--copies", "12", "--router", "round-robin"]
    assert plan([*FLEET, *goal, "--json", str(table), "--plot", str(plot)]) == 0
    (found,) = json.loads(table.read_text()).values()
    fewest = found["replicas"]
    assert found["gpus"] == fewest > 1
    enough, fewer = (found["runs"][str(count)]["spreads"] for count in (fewest, fewest - 1))
    assert enough["ttft"]["p99"] <= 1.5
    assert enough["itl"]["p99"] <= 0.5
    assert fewer["ttft"]["p99"] > 1.5 or fewer["itl"]["p99"] > 0.5
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f" {fewest} " in capsys.readouterr().out


def test_a_plan_without_enough_replicas_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([*FLEET, "--goal", "ttft.p50=0.0001", "--most", "2"]) == 0
    assert "> 2" in capsys.readouterr().out
