"""What is wrong with a GGUF file, as far as its metadata and the index of its tensors tell."""

from pathlib import Path

from gguf.constants import GGMLQuantizationType as Kind

from adapters.gguf.config import read_config
from adapters.gguf.file import GgufFile
from adapters.gguf.vocabulary import check_vocabulary

# The types of tensors that can be read; a test holds them to the readers of tensors.
KINDS = {
    *(Kind.F32, Kind.F16, Kind.BF16, Kind.MXFP4),
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS),
}


def checked_config(path: Path) -> dict[str, object]:
    """config.json of the file, whose vocabulary and types of tensors are checked too. Raises
    `StartupError` that names the key or tensor."""
    file = GgufFile(path)
    config = read_config(file)
    check_vocabulary(file)
    check_kinds(file)
    return config


def check_kinds(file: GgufFile) -> None:
    """Raise `StartupError` for a type of tensors that cannot be read."""
    for name, entry in file.tensors.items():
        if entry.kind not in KINDS:
            raise file.error(f"tensor {name} is {entry.kind.name}, which is not supported")
