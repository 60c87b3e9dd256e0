import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from adapters.images.gemma import Gemma3Processor
from adapters.images.qwen_vl import QwenVLProcessor
from adapters.images.smolvlm import SmolVLMProcessor
from adapters.tokenizers import load_tokenizer
from engine.errors import InvalidRequest
from engine.media import Media
from gateway.errors import PromptTooLong
from gateway.generation.image_prompt import ImagePrompt, Placeholders, cut_before, unmarked
from gateway.ports import ImageTile, PreparedImage, Tokenizer
from tests.blank import blank

BUILTIN = Path(__file__).parents[3] / "adapters" / "builtin"
FAMILIES = (QwenVLProcessor, Gemma3Processor, SmolVLMProcessor)
Family = type[QwenVLProcessor] | type[Gemma3Processor] | type[SmolVLMProcessor]


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in tokenizer with the tokens of all families."""
    document = json.loads((BUILTIN / "tokenizer.json").read_text())
    names = [name for family in FAMILIES for name in family.reserved]
    ids = [*document["model"]["vocab"].values(), *(each["id"] for each in document["added_tokens"])]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document["added_tokens"] += [
        {"id": number, "content": name, **plain, "special": True}
        for number, name in enumerate(names, max(ids) + 1)
    ]
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


def tile(seed: int, num_tokens: int) -> ImageTile:
    digest = sha256(bytes([seed])).digest()
    return ImageTile(num_tokens, digest, blank(1, 1, 4), (1, 1, 1))


# By family: what its template writes for an image, and the pieces that replace the placeholder.
PIECES: dict[Family, tuple[str, list[Any]]] = {
    QwenVLProcessor: ("<|vision_start|><|image_pad|><|vision_end|>", [tile(1, 5)]),
    Gemma3Processor: (
        "<start_of_image>",
        ["\n\n<start_of_image>", tile(1, 4), "<end_of_image>\n\n"],
    ),
    SmolVLMProcessor: (
        "<image>",
        [
            *("<fake_token_around_image><row_1_col_1>", tile(1, 3), "\n"),
            *("\n<fake_token_around_image><global-img>", tile(2, 3), "<fake_token_around_image>"),
        ],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("around", [("user\nWhat is ", " this?\n"), ("\n\n", "\n"), ("", "x")])
def test_ids_are_those_of_the_expanded_text(
    family: Family, around: tuple[str, str], directory: Path, tokenizer: Tokenizer
) -> None:
    written, pieces = PIECES[family]
    soft = family.soft_token
    text = f"{around[0]}{written}{around[1]}{written}"
    places = Placeholders(family)  # type: ignore[arg-type] # its names are those of the class
    prompt = places.ids(tokenizer, text, [PreparedImage(tuple(pieces))] * 2, None)
    expanded = "".join(p if isinstance(p, str) else soft * p.num_tokens for p in pieces)
    whole = text.replace(family.placeholder, "\0").replace("\0", expanded)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert list(prompt.ids) == library.encode(whole, add_special_tokens=False).ids
    soft_id = tokenizer.special_tokens[soft]
    covered = [at for each in prompt.media for at in range(each.start, each.end)]
    assert covered == [at for at, each in enumerate(prompt.ids) if each == soft_id]


PARTS = st.sampled_from(
    ["<|image_pad|>", "<|vision_start|>", "<|ima", "ge_pad|>", "<", "|", "\ufdd0", "a", " b\n"]
)


@given(st.lists(PARTS, max_size=12), st.integers(0, 2))
def test_a_users_text_never_becomes_a_token_around_images(
    tokenizer: Tokenizer, parts: list[str], num_images: int
) -> None:
    placeholders = Placeholders(QwenVLProcessor)  # type: ignore[arg-type] # as above
    users = "".join(parts)
    (marked,) = placeholders.marked([{"content": users}])
    text = PIECES[QwenVLProcessor][0] * num_images + marked["content"]
    images = [PreparedImage((tile(seed, 2),)) for seed in range(num_images)]
    prompt = placeholders.ids(tokenizer, text, images, None)
    special_ids = [each for each in prompt.ids if each in tokenizer.special_ids]
    assert len(special_ids) == 4 * num_images
    assert len(prompt.media) == num_images
    typed = b"".join(map(tokenizer.token_bytes, prompt.ids[4 * num_images :])).decode()
    assert typed == users.replace("\ufdd0", "") == unmarked(marked["content"])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=5), st.integers(1, 60))
def test_a_cut_leaves_whole_images(runs: list[tuple[int, int]], keep: int) -> None:
    ids: list[int] = []
    media: list[Media] = []
    for seed, (num_texts, num_tokens) in enumerate(runs):
        ids += range(100, 100 + num_texts)
        image = tile(seed, num_tokens)
        media.append(Media(len(ids), num_tokens, image.digest, image.pixels, image.grid))
        ids += [seed] * num_tokens
    cut = cut_before(ImagePrompt(tuple(ids), tuple(media)), keep)
    assert len(cut.ids) <= keep
    assert ids[len(ids) - len(cut.ids) :] == list(cut.ids)
    seeds = {each.digest: seed for seed, each in enumerate(media)}
    for each in cut.media:
        assert set(cut.ids[each.start : each.end]) == {seeds[each.digest]}
    assert sum(each.num_tokens for each in cut.media) == sum(each < 100 for each in cut.ids)


def test_a_prompt_that_is_too_long_says_how_long_it_is_at_least(tokenizer: Tokenizer) -> None:
    placeholders = Placeholders(QwenVLProcessor)  # type: ignore[arg-type] # as above
    images = [PreparedImage((tile(1, 50),))]
    text = f"a b c {PIECES[QwenVLProcessor][0]} {'d e f ' * 20}"
    with pytest.raises(PromptTooLong) as caught:
        placeholders.ids(tokenizer, text, images, 60)
    assert caught.value.limit == 60
    assert caught.value.min_tokens > 60
    with pytest.raises(InvalidRequest, match="writes 1 of the 2 images"):
        placeholders.ids(tokenizer, text, images * 2, None)
