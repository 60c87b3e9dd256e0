"""Model families by the `architectures` entry of config.json; each is imported on use."""

FAMILIES: dict[str, str] = {
    "GPT2LMHeadModel": "adapters.models.gpt2:Gpt2",
    "Gemma2ForCausalLM": "adapters.models.gemma2:Gemma2",
    "Gemma3ForCausalLM": "adapters.models.gemma3:Gemma3",
    "Gemma3ForConditionalGeneration": "adapters.models.gemma3:Gemma3Multimodal",
    "GraniteForCausalLM": "adapters.models.granite:Granite",
    "GptOssForCausalLM": "adapters.models.gpt_oss:GptOss",
    "LlamaForCausalLM": "adapters.models.llama:Llama",
    "MistralForCausalLM": "adapters.models.mistral:Mistral",
    "MixtralForCausalLM": "adapters.models.mixtral:Mixtral",
    "OPTForCausalLM": "adapters.models.opt:Opt",
    "Olmo2ForCausalLM": "adapters.models.olmo2:Olmo2",
    "Olmo3ForCausalLM": "adapters.models.olmo3:Olmo3",
    "Phi3ForCausalLM": "adapters.models.phi3:Phi3",
    "OlmoeForCausalLM": "adapters.models.olmoe:Olmoe",
    "Qwen2ForCausalLM": "adapters.models.qwen2:Qwen2",
    "Qwen3ForCausalLM": "adapters.models.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "adapters.models.qwen3_moe:Qwen3Moe",
    "SmolLM3ForCausalLM": "adapters.models.smollm3:SmolLM3",
    "StableLmForCausalLM": "adapters.models.stablelm:StableLM",
}
