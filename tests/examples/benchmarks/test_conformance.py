from examples.benchmarks.server.conformance.go_testers import rows_of, suites_of
from examples.benchmarks.server.conformance.page import (
    ALONE,
    GO_TESTERS,
    OTHER,
    PASSED,
    counts_of,
    results_of,
)
from tests.examples.benchmarks.published import read

JUNIT = """\
<testsuites><testsuite>
<testcase classname="tests.api_resources.chat.test_completions.TestCompletions" name="a">
  <properties><property name="requests" value="1"/></properties></testcase>
<testcase classname="tests.api_resources.chat.test_completions.TestCompletions" name="b">
  <properties><property name="requests" value="0"/></properties></testcase>
<testcase classname="tests.api_resources.test_files.TestFiles" name="c">
  <failure message="Error code: 404 - No endpoint&#10;at /v1/uploads."/></testcase>
<testcase classname="tests.api_resources.test_files.TestFiles" name="d">
  <failure message="assert False"/></testcase>
</testsuite></testsuites>
"""


def test_no_failure_is_without_a_reason() -> None:
    found = read("conformance/conformance.json")
    for run in ("as_they_are", "known_objects"):
        assert not any(row.get(OTHER) for row in found["openai_python"][run].values())
    for suite in ("open_responses", *GO_TESTERS):
        assert OTHER not in found[suite]["results"].values()


def test_failures_are_counted_by_file_and_reason() -> None:
    assert counts_of(JUNIT) == {
        "chat/completions": {PASSED: 1, ALONE: 1},
        "files": {"not served": 1, OTHER: 1},
    }


def test_an_unknown_failure_of_open_responses_is_another_one() -> None:
    results = [
        {"id": "b", "status": "failed", "errors": ["store: Required"]},
        {"id": "a", "status": "passed"},
    ]
    assert results_of({"results": results}) == {"a": "passed", "b": OTHER}


def test_failures_of_the_testers_in_go_have_reasons() -> None:
    output = """running suite "models"
  [PASS] models
  [FAIL] uploads: POST "http://x/v1/uploads": 404 {"message":"No endpoint at /v1/uploads."}
  [FAIL] (deprecated) assistants: what nobody knows
"""
    assert suites_of(output) == {"models": PASSED, "uploads": "not served", "assistants": OTHER}
    rows = [("a", ""), ("b", "expected 42"), ("c", "status 500")]
    named = [{"test_id": test, "error_message": message} for test, message in rows]
    assert rows_of(named) == {"a": PASSED, "b": "words of the model", "c": OTHER}
