"""Settings of what is served, the model, its texts, LoRA adapters, and drafts of its tokens, and of
how it is run."""

import re
from dataclasses import dataclass
from pathlib import Path

from engine.policy import POLICIES
from engine.setting import advanced, setting
from engine.speculation.settings import SpeculationSettings
from gateway.settings.generation_config import check_override, table_of

BUILTIN_MODEL = "builtin"
HOST = re.compile(r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z]([a-z0-9-]*[a-z0-9])?", re.IGNORECASE)


def speculation_settings(value: object) -> SpeculationSettings | None:
    """What `--speculative-config` describes, as JSON text or a table of a settings file with the
    keys of vLLM's flag; "" for none.

    Raises `ValueError` with the rest of a line that begins with the flag.
    """
    if value == "":
        return None
    given = table_of(value, '{"method": "ngram"}')
    try:
        return SpeculationSettings.parse(given)
    except ValueError as error:
        raise ValueError(f": {error}") from None


def _check_source(source: str) -> None:
    if not source.strip():
        raise ValueError("is empty; it must be builtin, a directory, a GGUF file or a hub id")


def _check_names(names: tuple[str, ...]) -> None:
    if len(set(names)) < len(names):
        raise ValueError("must be different names, separated by commas")


def _check_loras(values: tuple[str, ...]) -> None:
    names = [value.partition("=")[0] for value in values]
    if not all(value.partition("=")[2] and name for value, name in zip(values, names, strict=True)):
        raise ValueError("must be NAME=PATH, with the directory of a LoRA adapter")
    if len(set(names)) < len(names):
        raise ValueError("has the same name twice")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model that is served, its task, and how texts become its tokens."""

    source: str = setting(
        BUILTIN_MODEL,
        "model",
        "a directory, a GGUF file, a Hugging Face model id, builtin (the model that comes with "
        "Podway), or random:SHAPE for benchmarks",
        "MODEL",
        name="model",
        check=_check_source,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "model",
        "model names that clients use, separated by commas; default: the directory's name or the "
        "model id",
        "NAMES",
        check=_check_names,
    )
    task: str = setting(
        "auto",
        "model",
        "what the model is served for; auto: as its checkpoint says; embed: embeddings of texts; "
        "score: relevance of a document to a query (reranking)",
        choices=("auto", "generate", "embed", "score"),
    )
    mmproj: str = advanced(
        "",
        "model",
        "the image encoder of a GGUF model: a GGUF file, or org/name:FILE.gguf; default: the file "
        "mmproj*.gguf beside the model, which has to belong to it; off: none",
        "FILE",
    )
    max_model_len: int = setting(
        0,
        "model",
        "maximum length of a prompt and its output; 0: the checkpoint's context length",
        "TOKENS",
        ge=0,
    )
    speculative_config: SpeculationSettings | None = setting(
        None,
        "scheduling",
        "propose several next tokens and compute them in one step, without changing any output; "
        'a JSON object as in vLLM, such as {"method": "ngram", "num_speculative_tokens": 4}',
        "JSON",
        convert=speculation_settings,
    )
    override_generation_config: str = advanced(
        "{}",
        "model",
        "a JSON object with defaults of sampling parameters, instead of those in the checkpoint's "
        "generation_config.json",
        "JSON",
        convert=check_override,
    )
    chat_template: Path | None = setting(
        None, "model", "a Jinja file to use instead of the checkpoint's chat template", "FILE"
    )
    trust_request_chat_template: bool = advanced(
        False,
        "model",
        "accept the field chat_template in requests; such templates are rendered in a process of "
        "their own, with limits on time and memory",
    )
    tool_dialect: str = setting(
        "auto",
        "model",
        "format of the model's tool calls: auto (detected in the chat template), none, hermes, "
        "llama3, mistral, mistral-args, harmony, granite, phi4, gemma, gemma4, qwen-xml, olmo3",
        "NAME",
    )
    reasoning_dialect: str = setting(
        "auto",
        "model",
        "format of the model's reasoning: auto, none, think (<think>), mistral, harmony, gemma4",
        "NAME",
    )


def _check_hosts(values: tuple[str, ...]) -> None:
    for value in values:
        name, _, port = value.partition(":")
        if not HOST.fullmatch(name) or (":" in value and not port.isdecimal()):
            raise ValueError(
                f"must be names of hosts such as images.example.com, not {value!r}; addresses and "
                "patterns are not allowed"
            )


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The images of requests to a model that reads images."""

    media_hosts: tuple[str, ...] = setting(
        (),
        "access",
        "hosts from which images are fetched, by HTTPS at public addresses only, separated by "
        "commas, each NAME or NAME:PORT; default: none, images come in requests or as files",
        "HOSTS",
        check=_check_hosts,
    )
    image_max_tokens: int = setting(
        4096,
        "model",
        "maximum tokens of an image; a larger one is scaled down, as far as the model can",
        "TOKENS",
        ge=64,
    )
    max_images: int = advanced(64, "server", "maximum images of a request", "N", ge=1)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The LoRA adapters that are served beside the model."""

    lora: tuple[str, ...] = setting(
        (),
        "model",
        "a LoRA adapter in PEFT's format and the model name under which it is served; the flag can "
        "be repeated, or have several adapters separated by commas",
        "NAME=PATH",
        check=_check_loras,
    )
    max_loras: int = advanced(
        8, "model", "maximum LoRA adapters that are loaded at once", "N", ge=1, le=4096
    )
    max_lora_rank: int = advanced(
        64, "model", "maximum rank of a LoRA adapter", "RANK", ge=1, le=4096
    )


def _check_policy(name: str) -> None:
    if name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}, not {name!r}")


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """The scheduling policy, and what it knows about the times of iterations."""

    policy: str = setting(
        "fcfs",
        "scheduling",
        "scheduling policy: " + ", ".join(POLICIES),
        "NAME",
        check=_check_policy,
    )
    cost_model: str = advanced(
        "auto",
        "scheduling",
        "where the cost model of iterations comes from; auto: saved for this model and machine, "
        "else measured; measure: measured again; none: fitted while serving",
        choices=("auto", "measure", "none"),
    )
    cache_dir: Path | None = advanced(
        None,
        "scheduling",
        "directory for saved cost models; default: the user's cache directory",
        "DIR",
    )


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Where workers run, and how far the server plans ahead of them."""

    lookahead: str = advanced(
        "auto",
        "workers",
        "1: plan an iteration before the previous one's tokens are known, so that workers do not "
        "wait for the event loop; a request that ends may then compute one token too many; "
        "auto: on a GPU, and on CPUs with short steps and an idle core",
        choices=("auto", "0", "1"),
    )
    launcher: str = setting(
        "local",
        "workers",
        "local: worker processes on this machine; ray: actors on a Ray cluster",
        choices=("local", "ray"),
    )
    ray_address: str = advanced(
        "auto", "workers", "address of the Ray cluster; auto: this machine's cluster", "ADDRESS"
    )
    replicas: int = advanced(
        1,
        "workers",
        "copies of the model behind one queue, each with its share of the KV cache: on its share "
        "of the cores, on GPUs of its own, or on a Ray cluster; 0: one for each NUMA node",
        "N",
        ge=0,
        le=64,
    )
    trace: Path | None = advanced(
        None,
        "workers",
        "write a Chrome trace of each worker's steps to this file (see ui.perfetto.dev)",
        "FILE",
    )
