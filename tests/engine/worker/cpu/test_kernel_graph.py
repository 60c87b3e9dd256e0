import pytest
import torch

from engine.worker.cpu import kernel_graph
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from tests.engine.worker.cpu.int8_operators import int8_operators
from tests.noise import noise


@pytest.fixture(scope="module")
def pool() -> NativeThreadPool:
    return NativeThreadPool(2)


@pytest.fixture(params=[NativeOperators, int8_operators])
def operators(request: pytest.FixtureRequest, pool: NativeThreadPool) -> NativeOperators:
    made: NativeOperators = request.param(pool)
    return made


def an_mlp(operators: NativeOperators, hidden: int = 32, inner: int = 48):  # type: ignore[no-untyped-def]
    norm = operators.rms_norm(noise(hidden, seed=1), 1e-6)
    up = operators.linear([noise(2 * inner, hidden, seed=2)], None)
    down = operators.linear([noise(hidden, inner, seed=3)], noise(hidden, seed=4))
    activation = operators.activation("silu", is_gated=True)
    return lambda x: down(activation(up(norm(x))), x)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_replayed_graph_gives_the_same_bits(
    pool: NativeThreadPool, operators: NativeOperators, rows: int
) -> None:
    mlp, x = an_mlp(operators), noise(rows, 32)
    first, second = noise(rows, 32, seed=5), noise(rows, 32, seed=6)
    expected = [mlp(mlp(start.clone())) for start in (first, second)]
    with pool.recording(rows) as graph:
        mlp(mlp(x))
    for start, wanted in ((second, expected[1]), (first, expected[0])):
        x.copy_(start)
        pool.replay(graph)
        assert torch.equal(x, wanted)


def test_a_graph_is_replayed_for_any_number_of_rows(
    pool: NativeThreadPool, operators: NativeOperators
) -> None:
    mlp, x = an_mlp(operators), noise(64, 32)
    with pool.recording(64) as graph:
        mlp(mlp(x))
    assert graph.is_resizable
    for rows in (64, 1, 2, 8, 7, 33):
        start = noise(64, 32, seed=rows)
        x.copy_(start)
        graph.resize(rows)
        pool.replay(graph)
        assert torch.equal(x[:rows], mlp(mlp(start[:rows].clone())))
        assert torch.equal(x[rows:], start[rows:])


def test_a_graph_with_calls_over_other_rows_cannot_be_resized(
    pool: NativeThreadPool, operators: NativeOperators
) -> None:
    mlp, x = an_mlp(operators), noise(64, 32)
    with pool.recording(8) as graph:
        mlp(x[:8])
        mlp(x[:5])
    assert not graph.is_resizable


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_graph_joins_a_norm_and_an_activation_with_the_conversion_of_their_results(
    pool: NativeThreadPool, rows: int
) -> None:
    mlp, x = an_mlp(int8_operators(pool)), noise(rows, 32)
    expected = mlp(x.clone())
    with pool.recording(rows) as graph:
        mlp(x)
    assert len(graph) == 4, "norm and conversion, up, activation and conversion, down"
    pool.replay(graph)
    assert torch.equal(x, expected)


def test_calls_over_other_rows_are_not_joined(pool: NativeThreadPool) -> None:
    operators = int8_operators(pool)
    norm, linear = operators.rms_norm(noise(32), 1e-6), operators.linear([noise(16, 32)], None)
    x, other = noise(8, 32), noise(5, 32, seed=1)
    expected = linear(other)
    with pool.recording(8) as graph:
        norm(x)
        y = linear(other)
    assert len(graph) == 3
    pool.replay(graph)
    assert torch.equal(y, expected)


def test_graphs_of_many_sizes_share_one_output_memory(
    pool: NativeThreadPool, operators: NativeOperators
) -> None:
    mlp, graphs = an_mlp(operators), {}
    for rows in (3, 50, 1, 200, 8):
        x = noise(rows, 32, seed=rows)
        with pool.recording(rows) as graph:
            mlp(x)
        graphs[rows] = (x, graph)
    for rows, (x, graph) in graphs.items():
        start = noise(rows, 32, seed=90 + rows)
        x.copy_(start)
        pool.replay(graph)
        assert torch.equal(x, mlp(start))


def test_outputs_are_new_tensors_unless_a_graph_is_recorded(
    pool: NativeThreadPool, operators: NativeOperators
) -> None:
    norm, x = operators.rms_norm(noise(32, seed=1), 1e-6), noise(4, 32)
    first, second = norm(x), norm(2 * x + 1)
    assert not torch.equal(first, second)
    with pool.recording(4):
        first, second = norm(x), norm(2 * x + 1)
    assert first.data_ptr() == second.data_ptr()


def test_a_recording_that_fails_leaves_no_graph_in_the_pool(
    pool: NativeThreadPool, operators: NativeOperators
) -> None:
    mlp, start = an_mlp(operators), noise(2, 32)

    def fail() -> None:
        with pool.recording(2):
            mlp(start.clone())
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert pool.graph is None


def test_each_call_names_the_weights_of_the_next_linear_and_the_last_those_of_the_next_step(
    pool: NativeThreadPool, operators: NativeOperators
) -> None:
    mlp, x = an_mlp(operators), noise(1, 32)
    with pool.recording() as graph:
        mlp(x)
        mlp(x)
    ahead = [(first, end - first) for *_, first, end in graph.table().tolist()]
    places = list(dict.fromkeys(ahead))
    up, down, first = places
    assert ahead[0] == up
    assert up[1] > 0
    assert down[1] > 0
    start, stop = graph.first_weights
    assert first == (start, stop - start) == ahead[-1]
    changes = [now for now, before in zip(ahead, [first, *ahead], strict=False) if now != before]
    assert changes == [up, down, up, down, first]


def test_a_graph_names_the_weights_that_it_reads_first(
    pool: NativeThreadPool, operators: NativeOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp, x = an_mlp(operators), noise(2, 32)
    with pool.recording(2) as graph:
        mlp(x)
    up, down = (call.weights for call in graph._calls if call.weights is not None)
    assert down.data_ptr() == up.data_ptr() + up.nbytes
    assert graph.first_weights == (up.data_ptr(), down.data_ptr() + down.nbytes)
    monkeypatch.setattr(kernel_graph, "MAX_FIRST_BYTES", 100)
    with pool.recording(2) as graph:
        mlp(x)
    assert graph.first_weights == (up.data_ptr(), up.data_ptr() + 100)
