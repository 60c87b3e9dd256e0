"""Answer questions from documents: embed, rerank and chat on one server.

    podway serve --config examples/gallery/models.toml
    python examples/gallery/answer_from_documents.py [URL] [--documents DIRECTORY] [QUESTION …]

Documents are the paragraphs of the Markdown files in DIRECTORY; without it, some about Podway.
"""

import argparse
from pathlib import Path

import httpx
from openai import OpenAI

OWN = (
    "Podway serves OpenAI-compatible requests with an engine of its own.",
    "When a client disconnects, its KV cache is free after one more iteration.",
    "Skip-join MLFQ is a policy that serves short requests first.",
    "A batch uses the capacity that other requests leave.",
    "A model that is idle is unloaded, and loaded again by its next request.",
)
CANDIDATES, QUOTED = 20, 3  # paragraphs that are reranked, and those in the prompt


def paragraphs(directory: Path) -> list[str]:
    texts = [path.read_text() for path in sorted(directory.rglob("*.md"))]
    return [part.strip() for text in texts for part in text.split("\n\n") if len(part) > 40]


def embed(client: OpenAI, texts: list[str]) -> list[list[float]]:
    """Vectors of length 1, so that their product is the cosine."""
    return [item.embedding for item in client.embeddings.create(model="embedder", input=texts).data]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("questions", nargs="*", default=["Which policy serves short requests?"])
    parser.add_argument("--documents", type=Path)
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="any")
    documents = paragraphs(args.documents) if args.documents else list(OWN)
    index = embed(client, documents)
    for question in args.questions:
        [wanted] = embed(client, [question])
        near = sorted(range(len(index)), key=lambda at: -cosine(index[at], wanted))[:CANDIDATES]
        ranking = httpx.post(
            f"{args.url}/v1/rerank",
            json={
                "model": "reranker",
                "query": question,
                "documents": [documents[at] for at in near],
                "top_n": QUOTED,
            },
            timeout=600,
        )
        quotes = [
            documents[near[each["index"]]] for each in ranking.raise_for_status().json()["results"]
        ]
        prompt = "Answer from these notes.\n\n" + "\n".join(quotes) + f"\n\nQuestion: {question}"
        answer = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": prompt}]
        )
        print(f"{question}\n{answer.choices[0].message.content}")
        print(*(f"  from: {quote}" for quote in quotes), sep="\n")


if __name__ == "__main__":
    main()
