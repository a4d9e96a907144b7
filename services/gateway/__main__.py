"""`python -m services.gateway`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from halfmoon.engine.checkpoint.adapters import read_adapters
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.text.tokenizer import Detokenizer, Tokenizer
from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.listeners import check_listener
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.server import until_told_to_stop
from halfmoon.rpc.service import service_main
from halfmoon.rpc.telemetry.tracing import tracing
from services.gateway.openai.sampling_defaults import NEUTRAL, SamplingDefaults
from services.gateway.openai.served_model import ServedModel, SpecialTokens
from services.gateway.replies.reasoning import TAGS, reasons
from services.gateway.replies.tool_parsers import MARKS, format_of_template
from services.gateway.service import running_gateway
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

_ORPHANED_DRAIN_S = 2.0


def load_model(settings: GatewaySettings) -> ServedModel:
    """Loads what the gateway needs of the model. Raises InvalidRequest or UnknownModel."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one at a time: more threads would only cost
    checkpoint = prepare_checkpoint(
        settings.model,
        on_progress=lambda step: log.info("model", extra={"step": step}),
        for_any_engine=True,
        quantization=settings.quantization,
    )
    name, tokenizer = settings.model_name or checkpoint.name, Tokenizer(checkpoint)
    adapters = {adapter.name: adapter.fingerprint for adapter in read_adapters(settings.lora)}
    for taken in adapters.keys() & {name, *settings.model_alias}:
        raise InvalidRequest(f"lora: {taken!r} is a name of the model itself: call the adapter otherwise", param="lora")
    return ServedModel(
        name=name,
        checkpoint_name=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        vocab_size=checkpoint.vocab_size,
        context_tokens=checkpoint.context_tokens,
        tokenizer=tokenizer,
        new_detokenizer=_new_detokenizer(tokenizer),
        created=int(time.time()),
        aliases=settings.model_alias,
        adapters=adapters,
        defaults=_defaults(settings, checkpoint.path),
        reasons=settings.split_reasoning and reasons(tokenizer.chat_template),
        tokenizer_config=tokenizer.config,
        takes_documents="documents" in tokenizer.template_variables,
        reasoning_tags=_reasoning_tags(tokenizer),
        tool_format=format_of_template(tokenizer.chat_template, settings.tool_parser),
    )


def _new_detokenizer(tokenizer: Tokenizer) -> Callable[[SpecialTokens], Detokenizer]:
    marks = frozenset[str]().union(*MARKS.values())
    others = frozenset(one for one in tokenizer.special_token_ids if tokenizer.token_name(one) not in marks)

    def new_detokenizer(special_tokens: SpecialTokens) -> Detokenizer:
        return Detokenizer(tokenizer, special_tokens == "hidden", others if special_tokens == "marks" else frozenset())

    return new_detokenizer


def _reasoning_tags(tokenizer: Tokenizer) -> tuple[int, int] | None:
    begin, end = (tokenizer.encode(tag, with_special=False) for tag in TAGS)
    return (begin[0], end[0]) if len(begin) == len(end) == 1 else None


def _defaults(settings: GatewaySettings, path: Path) -> SamplingDefaults:
    return SamplingDefaults.of_model(path) if settings.generation_config == "model" else NEUTRAL


async def serve(settings: GatewaySettings, loaded: ServedModel | None) -> None:
    """Serves until SIGTERM or SIGINT."""
    credential = own_credential("gateway")
    check_listener(settings.cluster_listen, credential)  # before the model is prepared
    stop = asyncio.ensure_future(until_told_to_stop())
    with tracing("gateway", settings.otlp_endpoint) as tracer:
        model = await asyncio.to_thread(load_model, settings) if loaded is None else loaded
        async with running_gateway(settings, model, tracer, credential) as gateway:
            log.info("service.ready", extra={"address": gateway.address, "http": gateway.http})
            if await stop == "orphaned":  # the workers end now, too
                gateway.drain_gate.drain_s = min(gateway.drain_gate.drain_s, _ORPHANED_DRAIN_S)
            log.info("service.stopping")


if __name__ == "__main__":
    service_main("gateway", GatewaySettings, serve, load_model)
