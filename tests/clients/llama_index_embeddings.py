"""LlamaIndex's embeddings against a server, in the environment of `make clients`: prints JSON.

python llama_index_embeddings.py URL MODEL TEXT...
"""

import asyncio
import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

URL, MODEL, *TEXTS = sys.argv[1:]


def main() -> None:
    embed = OpenAILikeEmbedding(
        model_name=MODEL, api_base=f"{URL}/v1", api_key="any", embed_batch_size=3
    )
    results = {
        "batch": embed.get_text_embedding_batch(TEXTS),
        "query": embed.get_query_embedding(TEXTS[0]),
        "async": asyncio.run(embed.aget_text_embedding_batch(TEXTS)),
    }
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
