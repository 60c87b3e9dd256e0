"""What a timeline says: the phases of a request, and two sentences about it: the phase that cost it
the most time, its cause, and what would help; and how far its prompt was known."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.observe.prefixes import PrefixReport, Reason
from gateway.observe.timelines import Cause, Timeline, Timelines

SHORT = 0.05  # seconds; a shorter delay explains nothing
SMALL = 0.1  # so does a delay that is a smaller share of the time to compute the request
DELAYS = ("queued", "encoding", "preempted", "paused", "swapped", "restart", "reader")


class Span(NamedTuple):
    """A phase of a request. `start` is seconds after its arrival."""

    phase: str
    start: float
    seconds: float
    tokens: int | None = None


def spans_of(timeline: Timeline, now: float) -> list[Span]:
    """The phases of a request in order. A live request's last phase ends now."""
    request = timeline.request
    times, began = request.times, request.times.arrived_at
    end = now if times.ended_at is None else times.ended_at
    admitted = end if times.admitted_at is None else times.admitted_at
    first = end if times.first_token_at is None else times.first_token_at
    wanted = times.images_wanted_at
    encoding = admitted if wanted is None else min(wanted, admitted)
    found = [Span("queued", 0.0, encoding - began)]
    found.append(Span("encoding", encoding - began, admitted - encoding))
    found += _phase(timeline, "prefill", admitted, first, sum(size for _, size in timeline.pieces))
    if times.first_token_at is not None:
        found += _phase(timeline, "decode", first, end, request.produced)
    return _joined(span for span in found if span.seconds > 0 or span.phase == "queued")


def _phase(timeline: Timeline, name: str, start: float, end: float, tokens: int) -> list[Span]:
    """A phase, cut where the request was interrupted."""
    began, found, at = timeline.request.times.arrived_at, list[Span](), start
    for each in timeline.interruptions:
        if not start <= each.began < end:
            continue
        resumed = end if each.resumed is None else min(each.resumed, end)
        ended = end if each.ended is None else min(each.ended, end)
        found.append(Span(name, at - began, each.began - at))
        found.append(Span(each.kind, each.began - began, resumed - each.began))
        again = "recomputed" if each.kind in ("preempted", "restart") else name
        found.append(Span(again, resumed - began, ended - resumed))
        at = ended
    found.append(Span(name, at - began, end - at, tokens))
    return found


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans, of which consecutive ones of the same phase are one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].phase == span.phase:
            last = found.pop()
            tokens = span.tokens if last.tokens is None else last.tokens
            span = Span(span.phase, last.start, last.seconds + span.seconds, tokens)
        found.append(span)
    return found


def slowest(timelines: Sequence[Timeline], now: float) -> Timeline:
    """The choice of a request that took the longest."""
    return max(timelines, key=lambda each: sum(span.seconds for span in spans_of(each, now)))


def phase_seconds(timeline: Timeline, now: float) -> dict[str, float]:
    """Seconds by phase, in order of the phases' first occurrence."""
    seconds: dict[str, float] = {}
    for span in spans_of(timeline, now):
        seconds[span.phase] = seconds.get(span.phase, 0.0) + span.seconds
    return seconds


def explain(choices: Sequence[Timeline], label: str, timelines: Timelines, now: float) -> str:
    """The sentences about the choices of the request with this label."""
    longest = slowest(choices, now)
    sentence = _cost(longest, label, timelines, now)
    prefix = report_of(longest, timelines)
    return sentence if prefix is None else f"{sentence} {_about(prefix)}"


def report_of(timeline: Timeline, timelines: Timelines) -> PrefixReport | None:
    """What was known of a request's prompt, and the first message that was not."""
    request, ends = timeline.request, timeline.message_ends
    has_ended = request.state.is_terminal
    report = timeline.prefix if has_ended else timelines.prefixes.report(request)
    if report is None:
        return None
    place = bisect_right(ends, report.num_known)
    return report._replace(message=place if place < len(ends) else None)


def _about(prefix: PrefixReport) -> str:
    """The sentence about the prompt's beginning."""
    known, found = prefix.num_known, prefix.num_cached
    of = f" of request {prefix.relative}" if prefix.relative else ""
    message = prefix.message
    first = "behind them it differs" if message is None else f"message {message} (from 0) differs"
    match prefix.reason:
        case Reason.NEW:
            return "No recent prompt begins like it."
        case Reason.CACHED:
            return f"Its prompt is known{of}, and {found} tokens of it were in the prefix cache."
        case Reason.DIVERGED:
            return (
                f"Its first {known} tokens are those{of or ' of another request'}, all of them "
                f"in the prefix cache; {first}."
            )
        case Reason.OTHER_SALT:
            return "A recent prompt begins like it, but has another salt or API key."
        case Reason.OTHER_ADAPTER:
            return "A recent prompt begins like it, but has another LoRA adapter."
        case Reason.LOGPROBS:
            return "Its prompt was computed anew because its log-probabilities were requested."
    return (
        f"Its first {known} tokens are those{of or ' of another request'}, but only {found} of "
        "them were still in the prefix cache: the others were evicted, or there was no state to go "
        "on from at that place; a larger --kv-memory or --host-kv-memory keeps more, a cache "
        "breakpoint puts a state there."
    )


def _cost(longest: Timeline, label: str, timelines: Timelines, now: float) -> str:
    """The sentence about the phase that took the longest."""
    costs = phase_seconds(longest, now)
    costs["reader"] = sum(wait.seconds for wait in timelines.reader_waits.of(label))
    kinds = {each.kind for each in longest.interruptions}
    again = "restart" if "restart" in kinds and "preempted" not in kinds else "preempted"
    costs[again] = costs.get(again, 0.0) + costs.pop("recomputed", 0.0)
    phase = max(DELAYS, key=lambda each: costs.get(each, 0.0))
    seconds = costs.get(phase, 0.0)
    work = costs.get("prefill", 0.0) + costs.get("decode", 0.0)
    if phase == "reader":
        work -= seconds  # the engine computes while the client does not read
    if seconds < max(SHORT, SMALL * work):
        return _working(longest, costs)
    if phase == "queued":
        return _queued(longest, seconds, timelines, now)
    return _delayed(phase, longest, seconds)


def _working(timeline: Timeline, costs: dict[str, float]) -> str:
    prefill, decode = costs.get("prefill", 0.0), costs.get("decode", 0.0)
    restart = " A worker restarted meanwhile." if timeline.num_restarts else ""
    if prefill > decode:
        cached = f", {timeline.request.num_cached} of them from the prefix cache"
        return (
            f"It did not wait: computing its {timeline.request.prompt_len} prompt tokens{cached} "
            f"took {prefill:.2f} s in {_number(len(timeline.pieces), 'piece')}.{restart}"
        )
    produced = timeline.request.produced
    each = decode / max(1, produced - 1) * 1e3
    return (
        f"It did not wait: its {_number(produced, 'output token')} took {decode:.2f} s, "
        f"{each:.1f} ms each.{restart}"
    )


def _queued(timeline: Timeline, seconds: float, timelines: Timelines, now: float) -> str:
    cause, load = timeline.waited(now)
    running, waiting = _number(load.num_running, "request"), _number(load.num_waiting, "request")
    return f"It waited {seconds:.2f} s " + _CAUSES[cause].format(
        running=running, waiting=waiting, kv_share=load.kv_share
    )


_CAUSES = {
    Cause.KV: "for KV: {running} held {kv_share:.0%} of it; a larger --kv-memory or "
    "--host-kv-memory would have started it sooner.",
    Cause.SEAT: "for a seat: every step already had as many requests as --max-batch-size allows, "
    "and {waiting} waited; a larger --max-batch-size would have started it sooner.",
    Cause.TOKENS: "in the queue: {waiting} waited for tokens of a step; a larger "
    "--max-batch-tokens, more capacity or another --policy would have started it sooner.",
    Cause.WORKER: "for a worker that was started again; the server's log says why the last one "
    "ended.",
    Cause.STEP: "for the step in flight to end; a smaller --max-batch-tokens or --max-step-seconds "
    "makes steps shorter.",
}


def _delayed(phase: str, timeline: Timeline, seconds: float) -> str:
    request = timeline.request
    pauses = sum(each.kind == "paused" for each in timeline.interruptions)
    return _DELAYS[phase].format(
        seconds=seconds,
        images=_number(len(request.spec.media), "image"),
        preemptions=_number(request.setbacks.num_preemptions, "time"),
        pauses=_number(pauses, "time"),
        swaps=_number(request.setbacks.num_swaps, "time"),
        restarts=_number(timeline.num_restarts, "time"),
    )


_DELAYS = {
    "encoding": "It waited {seconds:.2f} s for the image encoder, which read its {images} and "
    "others' beside the tokens of all requests; smaller images, or the same ones again, take less.",
    "preempted": "It was preempted {preemptions} because KV ran short, and computed again: "
    "{seconds:.2f} s; --host-kv-memory keeps the KV of preempted requests, a larger --kv-memory "
    "avoids it.",
    "paused": "It was paused {pauses}, {seconds:.2f} s in all, while the policy ran other "
    "requests; a larger --max-batch-size or another --policy would have run it sooner.",
    "swapped": "Its KV was swapped out to the host {swaps}, {seconds:.2f} s in all, while other "
    "requests used the memory; a larger --kv-memory avoids it.",
    "restart": "A worker was lost {restarts} while it ran; starting the worker and computing the "
    "request again took {seconds:.2f} s. The server's log says why the worker ended.",
    "reader": "Its client did not read for {seconds:.2f} s while tokens were ready: the client or "
    "its network was slow, not the engine; a client that reads faster would have got it sooner.",
}


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
