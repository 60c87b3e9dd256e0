"""What is wrong with a checkpoint, as far as config.json and headers of tensors tell."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from adapters.gguf import check_file
from adapters.models.base.fields import Fields
from adapters.models.checkpoint import read_config
from adapters.models.checks.architecture import check_architecture
from adapters.models.quantization import stored_scheme
from engine.errors import StartupError
from engine.worker.weights.headers import TensorHeader, read_headers

LAYER = re.compile(r"(?P<root>(?:\w+\.)*?(?:layers|h|layer))\.(?P<number>\d+)\.(?P<rest>.+)")
# The layers of decoders and encoders of text; those of other towers are not counted.
ROOTS = {
    *("layers", "model.layers", "model.decoder.layers", "decoder.layers", "h", "transformer.h"),
    *("model.language_model.layers", "language_model.model.layers", "encoder.layer"),
    *("bert.encoder.layer", "roberta.encoder.layer"),
}
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
NARROW = "word_embed_proj_dim"  # the width of OPT's embeddings
PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers")  # layers behind the others
POSITIONS = ("max_position_embeddings", "n_positions")
FLOATS_OF_8_BITS = "F8_"


def check_checkpoint(
    directory: Path, max_model_len: int, mmproj: Path | None = None
) -> dict[str, TensorHeader]:
    """The headers of the checkpoint's tensors; none of a GGUF file or of random weights.

    Raises `StartupError` with one line that names the field, tensor or file.
    """
    has_headers = directory.is_dir()
    config = read_config(directory) if has_headers else check_file(directory, mmproj)
    architecture = check_architecture(config)
    text = _text_config(config)
    _check_positions(text, max_model_len)
    scheme = stored_scheme(config)
    if config.get("random_weights") is True or not has_headers:
        return {}
    headers = read_headers(directory)
    if not scheme:
        _check_dtypes(headers)
    _check_embeddings(text, headers)
    if not architecture.endswith("Model"):
        _check_layers(text, headers)
    return headers


def _text_config(config: Mapping[str, object]) -> Fields:
    fields = Fields(config)
    return fields.child("text_config") or fields


def _check_positions(text: Fields, max_model_len: int) -> None:
    for name in POSITIONS:
        if text.get(name) is not None and max_model_len > text.integer(name):
            raise StartupError(
                f"--max-model-len {max_model_len} is beyond the checkpoint's "
                f"{text.integer(name)} positions ({text.where}: {name})"
            )


def _check_dtypes(headers: Mapping[str, TensorHeader]) -> None:
    for name, header in headers.items():
        if header.dtype.startswith(FLOATS_OF_8_BITS) and len(header.shape) > 1:
            raise StartupError(
                f"tensor {name} is {header.dtype}, but config.json has no quantization_config that "
                "says how it is scaled"
            )


def _check_embeddings(text: Fields, headers: Mapping[str, TensorHeader]) -> None:
    if text.get(NARROW) is not None or text.get("vocab_size") is None:
        return
    width = "n_embd" if text.get("n_embd") is not None else "hidden_size"
    expected = (text.integer("vocab_size"), text.integer(width))
    for name, header in headers.items():
        is_embedding = name.rpartition(".")[0].count(".") < 3 and name.endswith(EMBEDDINGS)
        if is_embedding and "vision" not in name and header.shape != expected:
            raise StartupError(
                f"tensor {name} has shape {list(header.shape)}, but config.json implies "
                f"{list(expected)} from vocab_size and {width}"
            )


def _check_layers(text: Fields, headers: Mapping[str, TensorHeader]) -> None:
    """Every layer that config.json counts is there, with the norms that others have."""
    field = "n_layer" if text.get("n_layer") is not None else "num_hidden_layers"
    if text.get(field) is None:
        return
    count = text.layers(field)
    layers: dict[int, set[str]] = {}
    root = ""
    for match in _layer_matches(headers):
        root = match["root"]
        layers.setdefault(int(match["number"]), set()).add(match["rest"])
    if not layers:
        return
    expected = range(count)
    for number in expected:
        if number not in layers:
            raise StartupError(
                f"config.json: {field} is {count}, but the checkpoint has no tensor of layer "
                f"{root}.{number}"
            )
    beyond = max(layers) - max(text.count(name, 0) for name in PREDICTING)
    if beyond >= count:
        raise StartupError(
            f"config.json: {field} is {count}, but the checkpoint has tensors of layer "
            f"{root}.{beyond}"
        )
    norms = {rest for number in expected for rest in layers[number] if _is_norm(rest)}
    for number in expected:
        if absent := sorted(norms - layers[number]):
            raise StartupError(
                f"tensor {root}.{number}.{absent[0]} is missing from the checkpoint; other layers "
                "have it"
            )


def _layer_matches(names: Iterable[str]) -> Iterable[re.Match[str]]:
    matches = (LAYER.fullmatch(name) for name in names)
    return (match for match in matches if match is not None and match["root"] in ROOTS)


def _is_norm(rest: str) -> bool:
    """Whether it is the weight of a norm of the residual stream, which all layers have alike."""
    return rest.count(".") == 1 and rest.endswith("layernorm.weight")
