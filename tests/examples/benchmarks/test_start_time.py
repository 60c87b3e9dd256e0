from examples.benchmarks.server.start_time import COLUMNS, page

ROUNDS = [
    {"round": 0, "server": "ours", "first_seconds": 20.0},
    *(
        {
            "round": number,
            "server": "ours",
            "load": 0.5 + number,
            "cold_seconds": 5.0 + number,
            "warm_seconds": 2.0 + number,
            "cpu_seconds": 2.5,
            "pss_mib_at_rest": 550,
            "pss_mib_after": 600,
            "weights_mib": 480.0,
            "kv_mib": 20.0,
        }
        for number in range(3)
    ),
    {"round": 0, "server": "theirs", "load": 0.0, "warm_seconds": 1.0, "weights_mib": 0.0},
]


def test_the_page_has_medians_and_the_memory_beside_weights_and_kv() -> None:
    lines = page({"cpu": "Zen", "cores": 2, "rounds": ROUNDS}).splitlines()
    assert "| ours | 20.00 | 3.00 | 2.50 | 6.00 |  | 550 | 600 | 500 | 1.20 |" in lines
    assert "| theirs |  | 1.00 |" + "  |" * (len(COLUMNS) - 2) in lines
    assert "medians of 3 rounds" in lines[2]
    assert "load 0.0 to 2.5" in lines[2]
