"""Model families by the `architectures` entry of config.json; each is imported on use."""

FAMILIES: dict[str, str] = {
    "GPT2LMHeadModel": "adapters.models.gpt2:Gpt2",
    "LlamaForCausalLM": "adapters.models.llama:Llama",
    "MixtralForCausalLM": "adapters.models.mixtral:Mixtral",
    "MistralForCausalLM": "adapters.models.mistral:Mistral",
    "Qwen2ForCausalLM": "adapters.models.qwen2:Qwen2",
    "Qwen3MoeForCausalLM": "adapters.models.qwen3_moe:Qwen3Moe",
    "Qwen3ForCausalLM": "adapters.models.qwen3:Qwen3",
}
