"""Downloads checkpoints from the Hugging Face hub. Imported only when something is downloaded."""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from adapters.gguf import is_gguf
from engine.errors import StartupError
from engine.files import split_files

DOWNLOADED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
)
NOT_DOWNLOADED = ("*/*", "consolidated*")
MODULES = ("*_*/config.json",)  # modules of sentence-transformers, if modules.json names them


def download(model: str) -> Path:
    """The directory of a hub id, or the file of `org/name:FILE.gguf`. Raises `StartupError`."""
    repository, _, file = model.partition(":")
    try:
        if is_gguf(Path(file)):
            names = [each.as_posix() for each in split_files(Path(file))]
            first, *_ = [Path(hf_hub_download(repository, name)) for name in names]
            return first
        path: str = snapshot_download(
            model, allow_patterns=list(DOWNLOADED), ignore_patterns=list(NOT_DOWNLOADED)
        )
        if (Path(path) / "modules.json").is_file():
            snapshot_download(model, allow_patterns=list(MODULES))
    except HFValidationError as error:
        raise StartupError(f"{model} is neither a directory nor a hub id") from error
    except GatedRepoError as error:
        raise StartupError(f"{model} is gated on the hub; log in with access to it") from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"{model} is not a directory, and the hub has no such model") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, FileNotFoundError):
            raise StartupError(f"{repository} on the hub has no file {file}") from error
        raise StartupError(
            f"{model} is not a directory, and the hub cannot be reached to download it"
        ) from error
    return Path(path)
