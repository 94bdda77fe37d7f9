"""Chats that share messages: the ids of a text in pieces are those of the whole, and each message is encoded once."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from marconi.chat.pieces import Pieces, markers
from marconi.chat.tokenizer import TextTokenizer
from router.prompts import folders

MARKERS = ("<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "<unk>")
WORDS = ("The", " quick", "  ", "\n", "\n\n", " ", "größe", "中文", "e\u0301", "12345", "<", "|>", "it's", "\t")
TEXTS = st.lists(st.sampled_from(MARKERS + WORDS), max_size=12).map("".join)
CHATS = st.lists(TEXTS, min_size=1, max_size=6)


@pytest.fixture(scope="module", params=folders.NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.load(folders.write(request.param, tmp_path_factory.mktemp("model") / request.param))


class Counting(TextTokenizer):
    """Counts the characters that it encodes."""

    num_characters = 0

    def encode(self, text: str, *, adds_special: bool = True) -> "array[int]":
        self.num_characters += len(text)
        return super().encode(text, adds_special=adds_special)


def with_added(tokenizer: TextTokenizer, folder: Path, *tokens: AddedToken) -> TextTokenizer:
    """A tokenizer of its own that has these tokens, too."""
    tokenizer.hf.save_pretrained(folder)
    found = TextTokenizer.load(folder)
    found.hf.backend_tokenizer.add_tokens(list(tokens))
    return found


@given(chats=st.lists(CHATS, min_size=1, max_size=3))
def test_pieces_of_a_chat_have_the_ids_of_the_whole(tokenizer: TextTokenizer, chats: list[list[str]]) -> None:
    template = tokenizer.template() or ""
    pieces = Pieces(tokenizer, template)
    for chat in chats:
        for num_messages in range(1, len(chat) + 1):
            roles = ("user", "assistant")
            messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(chat[:num_messages])]
            text = tokenizer.render(messages, None, template, {})
            assert pieces.encode(text) == tokenizer.encode(text, adds_special=False)


def pieces_at(tokenizer: TextTokenizer, *texts: str) -> Pieces:
    return Pieces(tokenizer, "".join(texts))


@given(text=TEXTS)
def test_pieces_of_any_text_have_the_ids_of_the_whole(tokenizer: TextTokenizer, text: str) -> None:
    assert pieces_at(tokenizer, *markers(tokenizer.hf.backend_tokenizer)).encode(text) == tokenizer.encode(
        text, adds_special=False
    )


def test_each_message_of_a_growing_chat_is_encoded_once(tokenizer: TextTokenizer) -> None:
    counting = Counting(tokenizer.hf)
    template = counting.template() or ""
    pieces, messages = Pieces(counting, template), []
    counting.num_characters = 0
    for turn in range(20):
        messages.append({"role": ("user", "assistant")[turn % 2], "content": f"{turn} " * 100})
        text = counting.render(messages, None, template, {})
        assert pieces.encode(text) == tokenizer.encode(text, adds_special=False)
    assert counting.num_characters < 1.2 * len(text)


def test_the_ids_of_a_text_are_its_callers_own(tokenizer: TextTokenizer) -> None:
    pieces = Pieces(tokenizer, tokenizer.template() or "")
    pieces.encode("The quick").append(0)
    assert pieces.encode("The quick") == tokenizer.encode("The quick", adds_special=False)


def test_without_markers_a_text_is_encoded_whole(tokenizer: TextTokenizer) -> None:
    counting = Counting(tokenizer.hf)
    pieces = Pieces(counting, "no markers")
    counting.num_characters = 0
    assert pieces.encode("The quick") == pieces.encode("The quick")
    assert counting.num_characters == 2 * len("The quick")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([AddedToken("[cut]", lstrip=True, normalized=False)], "The quick \n[cut] fox"),
        ([AddedToken("[cut]", single_word=True, normalized=False)], "quick[cut] fox"),
        ([AddedToken("[cut]", normalized=False), AddedToken("quick[cut]", normalized=False)], "The quick[cut] fox"),
        ([AddedToken("[cut]", normalized=False), AddedToken("quick[c", normalized=False)], "The quick[cut] fox"),
    ],
    ids=["takes the space before it", "is a word of its own", "is in another", "begins in another"],
)
def test_a_token_that_a_cut_would_change_is_no_marker(tmp_path: Path, tokens: list[AddedToken], text: str) -> None:
    folder = folders.write("qwen", tmp_path / "qwen")
    tokenizer = with_added(TextTokenizer.load(folder), tmp_path / "added", *tokens)
    whole = tokenizer.encode(text, adds_special=False)
    before, after = text.split("[cut]")
    cut = [tokenizer.encode(piece, adds_special=False) for piece in (before, f"[cut]{after}")]
    assert cut[0] + cut[1] != whole, "a cut must show"
    assert "[cut]" not in markers(tokenizer.hf.backend_tokenizer)
    assert pieces_at(tokenizer, "[cut]", "<|im_start|>").encode(text) == whole


def test_a_token_that_is_found_as_it_stands_is_a_marker(tmp_path: Path) -> None:
    folder = folders.write("qwen", tmp_path / "qwen")
    tokenizer = with_added(TextTokenizer.load(folder), tmp_path / "added", AddedToken("[cut]", normalized=False))
    pipeline = tokenizer.hf.backend_tokenizer
    assert {"<|im_start|>", "<|im_end|>", "[cut]"} <= set(markers(pipeline))
    pipeline.encode_special_tokens = True
    assert "[cut]" in markers(pipeline)
    assert "<|im_start|>" not in markers(pipeline)
