"""The tools of a chat, and the choice among them, as bodies say them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from services.gateway.openai.bodies.strict_model import Items, Part

_MAX_TOOLS = 128

BUILT_IN = frozenset(
    (
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("file_search", "code_interpreter", "computer_use_preview", "computer", "image_generation", "mcp"),
        *("local_shell", "shell", "apply_patch", "custom", "namespace", "tool_search"),
    )
)
"""Types of tools of OpenAI's responses other than functions: the model is told of functions alone."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class FunctionDefinition(Part):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of its arguments")
    strict: bool | None = Field(None, description="arguments follow the schema where the call is required")


class Tool(Part):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Part):
    """The function of a tool that must be called."""

    name: Name


class NamedTool(Part):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Part):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=_MAX_TOOLS)]


class AllowedChoice(Part):
    """A choice among some of the tools: the model is told of no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[Items[Tool], Field(max_length=_MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required", "any"] | NamedTool | AllowedChoice
"""`any` is Mistral's name of `required`."""
