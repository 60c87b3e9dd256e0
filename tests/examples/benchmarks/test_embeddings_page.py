import pytest

from tests.examples.benchmarks.published import RESULTS, read


@pytest.mark.parametrize("name", ["Podway", "sentence-transformers", "llama-server"])
def test_the_page_has_the_rates_of_each_server(name: str) -> None:
    rates = read("embeddings/figures.json")["texts_per_second"]
    cells = [
        f"{one[name]['median']:.1f} ({min(one[name]['rounds']):.1f}–{max(one[name]['rounds']):.1f})"
        for one in (rates["short"], rates["long"])
    ]
    assert f"| {name} | {' | '.join(cells)} |" in (RESULTS / "embeddings/README.md").read_text()


def test_all_vectors_agree() -> None:
    assert min(read("embeddings/figures.json")["least_cosine"].values()) > 0.9999
