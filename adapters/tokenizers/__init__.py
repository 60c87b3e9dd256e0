"""Tokenizers of Hugging Face checkpoints behind the gateway's `Tokenizer` port.

Byte-level BPE runs in tiktoken if tiktoken can represent it exactly; everything else runs in
`tokenizers`. The ids equal Hugging Face's in both cases.
"""

from adapters.tokenizers.loading import load_token_table, load_tokenizer

__all__ = ["load_token_table", "load_tokenizer"]
