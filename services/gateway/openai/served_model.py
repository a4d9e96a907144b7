"""The model that the gateway serves, as far as the gateway needs it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from halfmoon.errors import InvalidRequest, UnknownModel
from services.gateway.http.error_responses import shortened
from services.gateway.openai.sampling_defaults import NEUTRAL, SamplingDefaults
from services.gateway.replies.text_stream import Decodes, PushesText
from services.gateway.replies.tool_parsers import ToolFormat


class PromptPrefix(Protocol):
    """`PrefixTokenizer` of the engine: a prompt's leading tokens, as far as they have been read."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The leading tokens of the prompt."""

    @property
    def is_whole(self) -> bool:
        """Whether these are all tokens of the prompt."""

    def read_on(self, num_tokens: int) -> None:
        """Reads about this many more tokens, if possible."""

    def least_tokens(self) -> int:
        """A lower bound on the tokens of the whole prompt."""


class Encodes(Decodes, Protocol):
    """halfmoon.engine.text.tokenizer.Tokenizer, as far as the gateway uses it."""

    def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
        """Token ids of a text. The time taken reveals nothing of texts of other salts."""

    def begin(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> PromptPrefix:
        """The same ids, read as far as needed."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        render: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> str:
        """The text of a conversation, by the model's template or by this one's `render`."""

    def token_name(self, token_id: int) -> str:
        """A token as written in the vocabulary."""


SpecialTokens = Literal["hidden", "marks", "shown"]
"""Which special tokens have a text in the output: none, those that mark calls of tools, or all."""

RenderTemplate = Callable[[str, str, Mapping[str, Any]], str]
"""Renders a tenant's template with variables."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as requests see it. Immutable."""

    name: str  # under which it is served
    checkpoint_name: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    tokenizer: Encodes
    new_detokenizer: Callable[[SpecialTokens], PushesText]
    created: int  # Unix seconds
    aliases: tuple[str, ...] = ()  # other names that requests may give it
    defaults: SamplingDefaults = NEUTRAL  # for what requests leave out
    reasons: bool = False  # it writes its reasoning in tags, which are parted from the answer
    adapters: Mapping[str, str] = field(default_factory=dict)  # fingerprint by the name that requests give it
    reasoning_tags: tuple[int, int] | None = None  # as tokens; None: they are no tokens of their own
    takes_documents: bool = False  # its chat template has a place for them
    render_template: RenderTemplate | None = None  # of a request, off the event loop; None: they are refused
    tenant: str = ""  # whose request it reads
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    tool_format: ToolFormat | None = None  # None: its chat template has no tool format that we can parse

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use, each once, its own first."""
        return tuple(dict.fromkeys((self.name, *self.aliases, *self.adapters)))

    def check_name(self, name: str) -> None:
        """Raises UnknownModel unless the model, or an adapter of it, is served under this name."""
        if name not in self.names:
            served = ", ".join(repr(one) for one in (self.name, *self.adapters))
            raise UnknownModel(
                f"the model {shortened(name)!r} does not exist; this server serves {served}", param="model"
            )

    def named(self, name: str | None) -> str:
        """The name to answer with where a request gives this one: an adapter's, or else the model's own."""
        return name if name is not None and name in self.adapters else self.name

    def check_token_ids(self, token_ids: Sequence[int] | Mapping[int, Any], param: str) -> None:
        """Raises InvalidRequest unless all are in the vocabulary."""
        outside = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if outside is not None:
            raise InvalidRequest(f"{param}: token id {outside} is not in 0..{self.vocab_size - 1}", param=param)
