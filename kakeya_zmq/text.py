"""Text ↔ tokens for the model's users: no model library is needed, only the model folder's tokenizer files.

The ids are those of transformers and mlx-lm for the same folder: all of them read the same ``tokenizer.json``. Loading it
takes about a second and a half for a vocabulary of 262,144, mlx-lm's own way five.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from wire.errors import InvalidInput, ModelError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

Message: TypeAlias = Mapping[str, Any]
"""One message of a chat: at least ``role`` and ``content``; the model's template may know more."""

REPLACEMENT: Final = "�"
PENDING_TOKENS_MAX: Final = 8
"""Tokens that may wait for the rest of a character: UTF-8 needs at most 4 bytes, thus 4 tokens; more are not valid text."""
_REMEDY_INSTALL: Final = 'pip install "kakeya-zmq[mlx]"'
_REMEDY_FOLDER: Final = "give a folder in the layout of mlx-lm (config.json, *.safetensors, tokenizer.json)"


class StreamDecoder:
    """Turns tokens into text one at a time; the pieces joined are the text of all tokens.

    A token is decoded together with the tokens before it (which decide about its leading space), and held back while it
    ends in the middle of a character. Special tokens give no text. One instance serves one answer.
    """

    __slots__ = ("_context", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        """Tokens given out last: what the next ones are decoded after."""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is still incomplete."""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < PENDING_TOKENS_MAX:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What was held back; incomplete bytes become U+FFFD. The decoder is empty afterwards."""
        text = self._new_text()
        self._context, self._pending = [], []
        return text

    def _new_text(self) -> str:
        before: str = self._tokenizer.decode(self._context, skip_special_tokens=True)
        after: str = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)
        return after[len(before) :]


class TextCodec:
    """A model folder's tokenizer, chat template and end tokens."""

    __slots__ = ("_bos", "_eos", "_template", "_tokenizer", "eos_token_ids")

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: tuple[int, ...], bos: str, eos: str, chat_template: str | None
    ) -> None:
        """Use :meth:`load`; this is for tests and for tokenizers that come from elsewhere."""
        self._tokenizer = tokenizer
        self._bos = bos
        self._eos = eos
        self._template = _compile(chat_template) if chat_template is not None else None
        self.eos_token_ids = eos_token_ids
        """Tokens that end an answer."""

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Read the tokenizer files of a model folder.

        Raises:
            ModelError: a file is missing or not what it should be, or the ``tokenizers`` package is missing.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ModelError("the package tokenizers is missing", remedy=_REMEDY_INSTALL) from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json", remedy=_REMEDY_FOLDER)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises the bare class for whatever it can't parse
            raise ModelError(f"{path} is not a tokenizer", remedy=_REMEDY_FOLDER) from error
        # A folder may have been saved with them on; a prompt must never be cut or filled up.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        return cls(
            tokenizer,
            eos_token_ids=_eos_token_ids(folder, settings, tokenizer),
            bos=_token_text(settings.get("bos_token")),
            eos=_token_text(settings.get("eos_token")),
            chat_template=_chat_template(folder, settings),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_bos`` also the special tokens that the model wants around a prompt.

        As in mlx-lm, a text that already begins with the model's begin token (a rendered chat) gets no second one.

        Raises:
            InvalidInput: ``text`` holds lone surrogates, which are no text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInput("the text holds half a character (a lone surrogate)") from error
        begun = bool(self._bos) and text.startswith(self._bos)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_bos and not begun).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for the tokens of one answer."""
        return StreamDecoder(self._tokenizer)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of a chat, special tokens written out.

        Raises:
            InvalidInput: the model has no chat template, a message lacks its role, or the template refuses the chat.
        """
        if self._template is None:
            raise InvalidInput("this model has no chat template", remedy="send a plain prompt instead")
        if not messages or not all(isinstance(message.get("role"), str) for message in messages):
            raise InvalidInput("a chat needs at least one message, each with a role")
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                eos_token=self._eos,
            )
        # Templates index and join what they are given: a message in another shape fails in any of these ways.
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            reason = error.message if isinstance(error, TemplateError) else None
            raise InvalidInput(f"the chat template refuses these messages: {reason or 'unexpected shape'}") from error

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a chat up to where the answer begins.

        Raises:
            InvalidInput: see :meth:`apply_chat_template`.
        """
        return self.encode(self.apply_chat_template(messages, tools=tools))


def _compile(source: str) -> Template:
    """Compile a chat template the way its authors expect (block trimming, loop controls, ``raise_exception``)."""
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ModelError("the package jinja2 is missing", remedy=_REMEDY_INSTALL) from error

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: object, indent: int | None = None) -> str:
        # Not Jinja's own, which escapes for HTML.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelError("the model's chat template is not valid") from error


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        pass  # the older place: inside the tokenizer's settings, one template or a list of named ones
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read", remedy=_REMEDY_FOLDER) from error
    match settings.get("chat_template"):
        case str() as template:
            return template
        case list() as named:
            for entry in named:
                match entry:
                    case {"name": "default", "template": str() as template}:
                        return template
    return None


def _eos_token_ids(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """End tokens from the first place that names them: generation settings, model settings, tokenizer settings."""
    for name in ("generation_config.json", "config.json"):
        match _read_json(folder / name).get("eos_token_id"):
            case int() as token:
                return (token,)
            case [int(), *_] as tokens if all(isinstance(token, int) for token in tokens):
                return tuple(tokens)
    token_id = tokenizer.token_to_id(_token_text(settings.get("eos_token")))
    return () if token_id is None else (int(token_id),)


def _token_text(value: object) -> str:
    """A special token's text: older folders store it as an object."""
    match value:
        case str():
            return value
        case {"content": str() as content}:
            return content
    return ""


def _read_json(path: Path) -> dict[str, Any]:
    """A settings file; empty when it isn't there."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read", remedy=_REMEDY_FOLDER) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold an object", remedy=_REMEDY_FOLDER)
    return value
