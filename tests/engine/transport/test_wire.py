import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.lora import LoraReport, LoraSpec
from engine.media import EncoderWork, EntryMedia, ImagePixels, ImageRows
from engine.pooling import PoolSpec
from engine.step import (
    BlockMove,
    BlockTable,
    Direction,
    Fault,
    Grammar,
    GrammarKind,
    Page,
    PageKind,
    PromptTargets,
    ProposalSpec,
    SampleSpec,
    SamplingParams,
    Snapshot,
    StateSlots,
    Step,
    StepEntry,
    StepResult,
    Tier,
    TokenLogprobs,
)
from engine.transport import wire
from engine.transport.wire import (
    FrameReader,
    Goodbye,
    LoadFailed,
    LoadLora,
    LoadProgress,
    LoadWorker,
    LoraLoaded,
    RunStep,
    SendPixels,
    StepFailure,
    StepRan,
    UnloadLora,
    WireError,
    WorkerLoaded,
    frame,
    read_from_worker,
    read_to_worker,
)
from engine.worker_settings import KVSettings, WorkerSettings
from tests.engine.transport.workers import REPORT
from tests.fakes import a_step

ids = st.integers(0, 2**63 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)
floats = st.floats(allow_nan=False)
samplings = st.builds(
    SamplingParams,
    temperature=floats,
    top_p=floats,
    top_k=st.integers(0, 2**31),
    min_p=floats,
    repetition_penalty=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31), floats), max_size=5).map(tuple),
    seed=st.integers(-(2**63), 2**64 - 1),
)
counts = st.integers(0, 2**31)
lines = st.text(st.characters(codec="utf-8"))
grammars = st.builds(Grammar, kind=st.sampled_from(GrammarKind), text=lines)
draws = st.builds(
    SampleSpec,
    sampling=samplings,
    banned=tokens,
    prompt=tokens,
    output=tokens,
    logprobs=st.none() | counts,
    grammar=st.none() | grammars,
    end_ids=tokens,
    continues=st.booleans(),
)
targets = st.builds(PromptTargets, top=counts, offset=counts, ids=tokens)
poolings = st.builds(
    PoolSpec, dimensions=st.none() | counts, first_len=st.none() | counts, token_ids=tokens
)
snapshots = st.lists(st.builds(Snapshot, num_tokens=counts, slot=counts), max_size=3).map(tuple)
rows = st.builds(ImageRows, image=counts, offset=counts, first=counts, num_rows=counts)
media = st.builds(
    EntryMedia,
    rows=st.lists(rows, max_size=3).map(tuple),
    shift=counts,
    positions=st.binary(max_size=40),
)
entries = st.builds(
    StepEntry,
    request_id=ids,
    start=st.integers(0, 2**31),
    tokens=tokens,
    blocks=st.binary(max_size=40),
    sample=st.none() | draws,
    prompt_logprobs=st.none() | targets,
    num_drafts=counts,
    lora_id=counts,
    pooling=st.none() | poolings,
    tables=st.lists(
        st.builds(BlockTable, first=counts, blocks=st.binary(max_size=40)), max_size=3
    ).map(tuple),
    state=st.none() | st.builds(StateSlots, slot=counts, source=counts, snapshots=snapshots),
    proposal=st.none() | st.builds(ProposalSpec, num_tokens=counts, start=counts, tokens=tokens),
    media=st.none() | media,
)
moves = st.builds(
    BlockMove,
    direction=st.sampled_from(Direction),
    device=st.binary(max_size=40),
    host=st.binary(max_size=40),
    is_awaited=st.booleans(),
    tier=st.sampled_from(Tier),
    hashes=st.binary(max_size=40),
    kind=st.sampled_from(PageKind),
)
steps = st.builds(
    Step,
    step_id=ids,
    entries=st.lists(entries, max_size=5).map(tuple),
    moves=st.lists(moves, max_size=3).map(tuple),
    encodes=st.lists(
        st.builds(EncoderWork, image=counts, start=counts, stop=counts), max_size=2
    ).map(tuple),
    dropped=st.lists(counts, max_size=3).map(tuple),
)
likely = st.builds(
    TokenLogprobs,
    logprob=floats,
    rank=counts,
    top=st.lists(st.tuples(counts, floats), max_size=3).map(tuple),
)
results = st.builds(
    StepResult,
    step_id=ids,
    tokens=tokens,
    seconds=floats,
    logprobs=st.lists(st.none() | likely, max_size=3).map(tuple),
    prompt_logprobs=st.lists(st.lists(likely, max_size=3).map(tuple), max_size=3).map(tuple),
    faults=st.lists(
        st.builds(Fault, entry=counts, message=lines, is_caller_error=st.booleans()), max_size=3
    ).map(tuple),
    num_accepted=st.lists(counts, max_size=3).map(tuple),
    unread=st.lists(st.builds(Page, st.sampled_from(PageKind), counts), max_size=3).map(tuple),
    proposals=st.lists(tokens, max_size=3).map(tuple),
    proposal_seconds=floats,
    encoder_seconds=floats,
)

lora_specs = st.builds(LoraSpec, lora_id=counts, name=lines, path=lines, digest=lines)
lora_reports = st.builds(
    LoraReport, lora_id=counts, digest=lines, rank=counts, num_bytes=ids, error=lines
)
to_worker = st.one_of(
    steps.map(RunStep),
    lora_specs.map(LoadLora),
    counts.map(UnloadLora),
    st.builds(WorkerSettings, model=lines, kv=st.builds(KVSettings, kv_memory=ids)).map(LoadWorker),
    st.builds(
        ImagePixels,
        image=counts,
        offset=counts,
        data=st.binary(max_size=40),
        shape=st.tuples(counts, counts),
        grid=st.tuples(counts, counts, counts),
        values=st.binary(max_size=40),
    ).map(SendPixels),
    st.just(Goodbye()),
)
from_worker = st.one_of(
    results.map(StepRan),
    lora_reports.map(LoraLoaded),
    st.builds(StepFailure, step_id=ids, message=lines),
    st.builds(LoadProgress, what=lines, done=ids, total=ids),
    st.just(WorkerLoaded(REPORT)),
    lines.map(LoadFailed),
)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def payload_of(data: bytearray) -> bytearray:
    (payload,) = FrameReader().feed(data)
    return payload


@relaxed
@given(to_worker)
def test_a_message_to_a_worker_is_read_back_equal(message: wire.ToWorker) -> None:
    assert read_to_worker(payload_of(frame(message))) == message


@relaxed
@given(from_worker)
def test_a_message_from_a_worker_is_read_back_equal(message: wire.FromWorker) -> None:
    assert read_from_worker(payload_of(frame(message))) == message


@relaxed
@given(st.lists(to_worker, max_size=4), st.data())
def test_frames_survive_any_split_of_the_stream(
    messages: list[wire.ToWorker], data: st.DataObject
) -> None:
    stream = b"".join(frame(message) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    payloads = [
        payload
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for payload in reader.feed(stream[start:end])
    ]
    assert [read_to_worker(payload) for payload in payloads] == messages


@relaxed
@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_wire_error(garbage: bytes) -> None:
    for read in (read_to_worker, read_from_worker):
        try:
            message = read(bytearray(garbage))
        except WireError:
            continue
        assert message is not None


def test_a_message_of_the_other_direction_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="from a worker"):
        read_from_worker(payload_of(frame(Goodbye())))
    with pytest.raises(WireError, match="to a worker"):
        read_to_worker(payload_of(frame(LoadFailed("no"))))


def test_a_string_that_is_not_utf8_is_a_wire_error() -> None:
    payload = payload_of(frame(LoadFailed("xx")))
    payload[-2:] = b"\xff\xfe"
    with pytest.raises(WireError, match="from a worker"):
        read_from_worker(payload)


@pytest.mark.parametrize("num_bytes", [0, 101, 2**32 - 1])
def test_an_invalid_length_is_rejected_before_its_bytes_arrive(num_bytes: int) -> None:
    reader = FrameReader(max_frame_bytes=100)
    with pytest.raises(WireError, match=f"a frame of {num_bytes} bytes; 1 to 100 are allowed"):
        reader.feed(wire.HEADER.pack(num_bytes))


def test_a_frame_of_exactly_the_limit_is_read() -> None:
    reader = FrameReader(max_frame_bytes=100)
    assert reader.feed(wire.HEADER.pack(100) + bytes(100)) == [bytes(100)]


def test_a_message_above_the_size_limit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 50)
    with pytest.raises(WireError, match="the limit is 50"):
        frame(RunStep(a_step(1, 2, 3, 4)))
