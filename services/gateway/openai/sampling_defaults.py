"""How a model wants to be sampled where a request does not say: its `generation_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from halfmoon.engine.checkpoint.checkpoint import read_json
from halfmoon.errors import InvalidRequest

_FILE = "generation_config.json"


class SamplingDefaults(BaseModel):
    """Values for parameters that a request leaves out. Those that are None are neutral."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    max_new_tokens: int | None = Field(None, ge=1)  # of a chat's answer

    @classmethod
    def of_model(cls, path: Path) -> Self:
        """The defaults of the model in a directory; neutral if it says nothing. Raises InvalidRequest for bad ones."""
        try:
            return cls.model_validate(read_json(path / _FILE))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            message = (
                f"{path / _FILE}: {name}: {first['msg']}; mend the file, or start with --generation-config neutral"
            )
            raise InvalidRequest(message, param="model") from error


NEUTRAL = SamplingDefaults()
