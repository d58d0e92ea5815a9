"""Text to token ids and back, and the chat template, from the checkpoint's own files.

tokenizer.json is read by the tokenizers library; `chat_template.py` runs the template.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders

from oled_moe.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from oled_moe.chat_template import ChatTemplate

MASK_NAMES = ("<|mask|>", "<|MASK|>")
# Part of an answer's text, though some tokenizers call them special: tool calls are read from it.
_TEXT_TAGS = ("<tool_call>", "</tool_call>")
# Beyond so many letters a text takes long enough to matter to other threads.
_LONG_TEXT = 4096


class Tokenizer:
    """The tokenizer of one checkpoint.

    Raises: CheckpointError for a tokenizer file that cannot be read.
    """

    def __init__(
        self, raw: RawTokenizer, settings: Mapping[str, Any], chat_template: str | None
    ) -> None:
        self._raw = raw
        self._settings = settings
        self.chat_template = chat_template
        self._template: ChatTemplate | None = None

    @classmethod
    def load(cls, model: Path) -> "Tokenizer | None":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja; None without.

        They lie in the directory that `model` is, or beside the file.
        """
        directory = model.parent if model.is_file() else model
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            raw = _with_tags_as_text(RawTokenizer.from_str(path.read_text(encoding="utf-8")))
        # The library raises plain Exception for malformed files.
        except Exception as error:
            raise CheckpointError(
                f"{path}: cannot be read as a tokenizer ({error}); download it again"
            ) from None
        settings = _read_settings(directory / "tokenizer_config.json")
        template = settings.get("chat_template")
        own_file = directory / "chat_template.jinja"
        if own_file.is_file():
            template = _read_text(own_file)
        return cls(raw, settings, template if isinstance(template, str) else None)

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written in the text are recognised, none are added.

        Raises: InputError for text that is not valid Unicode.
        """
        try:
            if len(text) <= _LONG_TEXT:
                ids: list[int] = self._raw.encode(text, add_special_tokens=False).ids
            else:
                # The same tokens; only this function lets other threads run meanwhile.
                ids = self._raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
        # What Python calls a string and UTF-8 cannot write: half of a surrogate pair.
        except TypeError:
            raise InputError(
                "the text is not valid Unicode (it holds half of a surrogate pair); send UTF-8"
            ) from None
        # A panic of the library, such as a pattern that backtracks without end, is no Exception.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise InputError(f"the tokenizer failed on this text: {error}") from None
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        text: str = self._raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def longest_token_bytes(self) -> int:
        """Most bytes of text that one token stands for: a text of n bytes has n by it at least."""
        added = {token.content for token in self._raw.get_added_tokens_decoder().values()}
        # Byte-level vocabularies write a letter for each byte.
        is_byte_level = isinstance(self._raw.decoder, decoders.ByteLevel)
        return max(
            len(token) if is_byte_level and token not in added else len(token.encode())
            for token in self._raw.get_vocab(with_added_tokens=True)
        )

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, for other libraries."""
        text: str = self._raw.to_str()
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text."""
        try:
            token_id: int | None = self._raw.token_to_id(token)
        except UnicodeError:
            return None
        return token_id

    @property
    def mask_token_id(self) -> int | None:
        names = (self._special("mask_token"), *MASK_NAMES)
        return next((i for i in map(self._id_or_none, names) if i is not None), None)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_or_none(self._special("eos_token"))

    @property
    def pad_token_id(self) -> int | None:
        return self._id_or_none(self._special("pad_token"))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as one prompt text.

        Raises: InputError where the checkpoint has no template or the template refuses.
        """
        if self.chat_template is None:
            raise InputError("this checkpoint has no chat template; send a plain prompt (--raw)")
        # Whoever has another template in mind may set it.
        if self._template is None or self._template.text != self.chat_template:
            # Only conversations need jinja2.
            from oled_moe.chat_template import ChatTemplate

            self._template = ChatTemplate(self.chat_template)
        specials = {
            name: self._special(name)
            for name in ("bos_token", "eos_token", "pad_token", "mask_token", "unk_token")
        }
        known = {name: token for name, token in specials.items() if token is not None}
        return self._template.render(
            messages,
            known,
            {"add_generation_prompt": add_generation_prompt, **variables},
        )

    def _special(self, name: str) -> str | None:
        value = self._settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _id_or_none(self, token: str | None) -> int | None:
        return None if token is None else self.token_id(token)


def _with_tags_as_text(raw: RawTokenizer) -> RawTokenizer:
    """The tokenizer with no special token among the tags that belong to text."""
    added = raw.get_added_tokens_decoder().values()
    if not any(token.special and token.content in _TEXT_TAGS for token in added):
        return raw
    values = json.loads(raw.to_str())
    for token in values["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in _TEXT_TAGS
    return RawTokenizer.from_str(json.dumps(values))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); download it again") from None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); download it again") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: is not a JSON object; download it again")
    return settings
