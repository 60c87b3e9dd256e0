import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "gateway" / "PROTECTION.md"
ROW = re.compile(r"^\| (\d+)[a-z]? \|.*`(tests/\S+\.py)::(test_\w+)` \|$", re.M)


def test_each_protection_names_its_test() -> None:
    numbers = [int(number) for number, _, _ in ROW.findall(PAGE.read_text())]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 30))


def test_the_named_tests_exist() -> None:
    for number, path, name in ROW.findall(PAGE.read_text()):
        defined = re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M)
        assert defined, f"row {number}"
