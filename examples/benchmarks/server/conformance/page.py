"""What the suites found, by reason, and the page of it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree

PASSED, ALONE, SKIPPED, OTHER = "passed", "without a request", "skipped", "other"
REASONS = {  # of a failure: how its message is found
    "not served": (
        "No endpoint at", "is not allowed here; allowed", "Compaction is not supported",
        "'prompt' is not supported", "Supported values for 'purpose'",
        "'stream_options.include_obfuscation' is not supported", "this model reads text only",
    ),
    "id of nothing": (
        "You have no ", "no file of yours", "no item 'after'", "Conversation with id",
    ),
    "no valid value": (
        "expected a number from 1", "expected an integer of at least 1", "Missing required",
        "is only allowed when 'stream' is true", "cannot be set together with",
    ),
    "size of another model": ("'dimensions' is not supported by this model",),
    "client refuses base64": ("Data returned by API invalid",),
}  # fmt: skip
TESTER_REASONS = {  # the same of the testers in Go
    "not served": (*REASONS["not served"], "'modalities' is not supported"),
    "words of the model": (
        "choice text is empty", "stream produced no text", "want response containing", "expected ",
        "invalid structured json", "missing text", "missing content",
        "unexpected custom tool input", "unexpected math expression result",
    ),
    "null or blank": ("missing refusal field", "missing string delta"),
}  # fmt: skip
GO_TESTERS = {
    "beranekio": "github.com/beranekio/openai-compatibility-tester",
    "avelrl": "github.com/avelrl/openai-compatible-tester",
}
COLUMNS = (PASSED, ALONE, *REASONS, OTHER, SKIPPED)
_REQUESTS = ".//property[@name='requests']"


def reason_of(message: str, reasons: Mapping[str, tuple[str, ...]] = REASONS) -> str:
    """Why a test failed."""
    found = [reason for reason, marks in reasons.items() if any(m in message for m in marks)]
    return found[0] if found else OTHER


def tester_reason(message: str) -> str:
    """Why a test of a tester in Go failed; without a message it has passed."""
    return reason_of(message, TESTER_REASONS) if message else PASSED


def counts_of(junit: str) -> dict[str, dict[str, int]]:
    """The results of a pytest run by the file of its tests; those that passed without a request
    to the server are counted apart."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = case.get("classname", "").rpartition(".")[0]
        resource = name.removeprefix("tests.api_resources.").replace("test_", "").replace(".", "/")
        requests = case.find(_REQUESTS)
        bad = [child for kind in ("failure", "error") for child in case.iter(kind)]
        if bad:
            result = reason_of(" ".join(bad[0].get("message", "").split()))
        elif case.find("skipped") is not None:
            result = SKIPPED
        else:
            result = PASSED if requests is not None and requests.get("value") != "0" else ALONE
        counts.setdefault(resource, Counter())[result] += 1
    return {resource: dict(found) for resource, found in sorted(counts.items())}


def results_of(report: Mapping[str, Any]) -> dict[str, str]:
    """The results of Open Responses' tests by their ids, failures by reason."""
    return {
        each["id"]: each["status"]
        if each["status"] != "failed"
        else reason_of(" ".join(each["errors"]) + str(each.get("response")))
        for each in sorted(report["results"], key=lambda each: str(each["id"]))
    }


def table(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The lines of a table of openai-python's tests, with a last one for all."""
    total = Counter[str]()
    for row in counts.values():
        total.update(row)
    used = [name for name in COLUMNS if total[name]]
    rows = {**counts, "all": total}
    return [
        f"| tests of | number | {' | '.join(used)} |",
        f"|---|{'---|' * (len(used) + 1)}",
        *(
            f"| {name} | {sum(row.values())} | "
            f"{' | '.join(str(row.get(column) or '') for column in used)} |"
            for name, row in rows.items()
        ),
    ]


def page(found: Mapping[str, Any]) -> str:
    """README.md of the results."""
    ours, theirs = found["openai_python"], found["open_responses"]
    passed = sum(result == PASSED for result in theirs["results"].values())
    lines = [
        "# Conformance suites of other projects",
        "",
        "`python -m examples.benchmarks.server.conformance` ([JSON](conformance.json)), against "
        "one server of the built-in",
        "model, which has the names of the tests' models, and of all-MiniLM-L6-v2 as "
        "`text-embedding-3-small`." + f" {found['note']}" * ("note" in found),
        "",
        "## openai-python's tests of API resources",
        "",
        f"Version {ours['version']} (`{ours['commit']}`), the files for what Podway serves or "
        "might be expected to. They are written for",
        "a server that invents answers, and check that these have the described shape, five times "
        "each: the sync and the async",
        "client, loose and strict, and the async one over aiohttp.",
        "",
        *table(ours["as_they_are"]),
        "",
        *_legend(),
        "",
        "The same with objects that exist in place of the ids, and a `model` and an `input` where "
        "there is neither:",
        "",
        *table(ours["known_objects"]),
        "",
        "## Open Responses' compliance tests",
        "",
        f"Specification {theirs['version']} (`{theirs['commit']}`), with WebSockets: {passed} of "
        f"{len(theirs['results'])} pass.",
        "",
        "| test | result |",
        "|---|---|",
        *(f"| {name} | {result} |" for name, result in theirs["results"].items()),
        "",
        "Not served: compaction, and images by a model that reads text only.",
        "",
        *_testers(found),
    ]
    return "\n".join(lines)


def _testers(found: Mapping[str, Any]) -> Iterable[str]:
    yield "## Two testers in Go"
    yield ""
    yield "`python -m examples.benchmarks.server.conformance.go_testers`: all suites of the first,"
    yield "both configurations of the second, in its mode `strict`. The proxy of modules was not"
    yield "reachable: modules are repositories and Debian's packages, some of near versions."
    yield ""
    yield "- *words of the model*: the tester wants an answer (`HELLO`, `42`) that a model of two"
    yield "  million parameters does not give; what surrounds it has the right shape."
    yield "- *null or blank*: the tester takes `logprobs.refusal: null`, or a delta of one space,"
    yield "  for a field that is missing."
    yield ""
    yield "| tester | tests | result | which |"
    yield "|---|---|---|---|"
    for name, address in GO_TESTERS.items():
        if name in found:
            tester = f"{address} (`{found[name]['commit']}`)"
            yield from _tester_rows(tester, found[name]["results"])
    yield ""


def _tester_rows(tester: str, results: Mapping[str, str]) -> Iterable[str]:
    for result in (PASSED, *TESTER_REASONS, OTHER):
        which = [test for test, got in results.items() if got == result]
        if which:
            share = f"{len(which)} of {len(results)}"
            yield f"| {tester} | {share} | {result} | {', '.join(which)} |"


def _legend() -> Iterable[str]:
    yield "- *without a request*: the client, or a mock of the suite, answers."
    yield "- *not served*: stored chat completions, moderations, uploads,"
    yield "  stored prompts, compaction, deleting models, files for assistants, obfuscated events."
    yield "- *id of nothing*: a placeholder such as `batch_id`, which gets a 404 or a 400."
    yield "- *no valid value*: `limit` 0, `max_completion_tokens` 0, no `model`, `stream_options`"
    yield "  without `stream`."
    yield "- *size of another model*: `dimensions` of a model that was not trained to be cut."
    yield "- *client refuses base64*: in strict mode the client checks embeddings before it decodes"
    yield "  the base64 that it asked for."
