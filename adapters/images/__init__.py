"""Images to what a model's encoder reads: one module per family of processors."""

# The names that checkpoints give their image processors; a class is imported when it is used.
PROCESSORS = {
    "Qwen2VLImageProcessor": "adapters.images.qwen_vl:QwenVLProcessor",
    "Qwen3VLImageProcessor": "adapters.images.qwen_vl:QwenVLProcessor",
    "Gemma3ImageProcessor": "adapters.images.gemma:Gemma3Processor",
    "Gemma4ImageProcessor": "adapters.images.gemma:Gemma4Processor",
    "Idefics3ImageProcessor": "adapters.images.smolvlm:SmolVLMProcessor",
    "SmolVLMImageProcessor": "adapters.images.smolvlm:SmolVLMProcessor",
}
