"""Selects the code that computes on the configured device. triton and native kernels are imported only if chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.attention.attention import SdpaBackend
from halfmoon.engine.attention.attention_backend import AttentionBackend
from halfmoon.engine.attention.attention_table import Backend, attends, need_of
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization
from halfmoon.engine.checkpoint.converted import default_cache_dir
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.config import EngineConfig, Kernels
from halfmoon.engine.kv_memory.kv_arena import TORCH_DTYPES, KVArena
from halfmoon.engine.model_runner import DecodeSteps, ModelRunner
from halfmoon.engine.models import Model
from halfmoon.engine.models.blocks import Blocks, quantised
from halfmoon.engine.models.layer_ops import TORCH_OPS, LayerOps
from halfmoon.engine.models.linear import Multiply, PackLayer, PackWeight, alike, pack_onednn
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.native.prepared_model import KeptWeights, Packing, Wrap, kept_weights
from halfmoon.engine.sampler import TORCH_SAMPLER, SamplerOps
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout, KVSlice

logger = logging.getLogger(__name__)

_TILED_TOKENS = 128  # new tokens of a prompt that fill the largest tile by themselves


@dataclass(frozen=True, slots=True)
class DevicePath:
    """The parts that a model and its memory are built with. `kernels` names the implementation of layers and copies."""

    kernels: Kernels
    layer_ops: LayerOps
    pack_weight: PackWeight
    attention: AttentionBackend
    packing: Packing | None = None  # None: packed weights cannot be kept
    use_threads: Callable[[int], None] = torch.set_num_threads  # how many, from now on, where they compute on a CPU
    sampler: SamplerOps = TORCH_SAMPLER


def check_device(device: str) -> None:
    """Raises Incompatible for a device that PyTorch does not have here."""
    kind, _, index = device.partition(":")
    if device == "cpu":
        return
    if kind != "cuda" or not (index or "0").isdecimal():
        problem = "there are cpu and cuda"
    elif not torch.cuda.is_available():
        problem = f"PyTorch {torch.__version__} is a build without CUDA: install one with it, or use --device cpu"
        if torch.version.cuda is not None:
            problem = "PyTorch sees no CUDA device here: see whether nvidia-smi does, or use --device cpu"
    elif int(index or 0) >= torch.cuda.device_count():
        problem = f"PyTorch sees {torch.cuda.device_count()} CUDA devices here"
    else:
        return
    raise Incompatible(f"--device {device}: {problem}", param="device")


def choose_path(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, context_tokens: int) -> DevicePath:
    """The path of `config.attention_backend` for a model or a rank's part of one.

    Where its kernels do not attend as the model does (`attention_table`), torch attends, and the log says so.

    Raises Incompatible if an explicitly configured path cannot run; "auto" falls back to torch's code.
    """
    if config.attention_backend == "native":
        try:
            return _native_path(config, model, dtype, context_tokens)
        except Incompatible as error:
            if config.attention != "auto":
                raise
            logger.warning("native_kernels.unavailable", extra={"reason": error.message})
    elif config.attention_backend == "triton":
        return _triton_path(config, model, dtype, context_tokens)
    elif config.attention_backend == "flex":
        return DevicePath("torch", TORCH_OPS, pack_onednn, _flex_attention(config, model, context_tokens))
    return DevicePath("torch", TORCH_OPS, pack_onednn, _torch_attention(config))


def keeps_blocks(checkpoint: Checkpoint, path: DevicePath) -> bool:
    """Whether weights in blocks stay so: `path` multiplies with them, and `--quantization` is auto."""
    return path.kernels == "native" and checkpoint.quantization == "auto"


@torch.no_grad()
def pack(
    model: Model,
    path: DevicePath,
    quantization: Quantization,
    wrap: Wrap = lambda pack_weight: pack_weight,
    pack_layer: PackLayer = alike,
) -> None:
    """Packs all matrices for `path`, rounded to eight or four bits if so configured; the head never to four.

    What is never rounded is packed for our CPU kernels only: torch multiplies with it in float32.

    `wrap` makes what is called in place of each `PackWeight`, and `pack_layer` then what is called for a layer.

    Raises Incompatible for a path that does not multiply with rounded weights.
    """
    pack_exact = wrap(path.pack_weight) if path.kernels == "native" else None
    if quantization not in ("int8", "int4"):
        model.pack(wrap(path.pack_weight), None, pack_layer, pack_exact)
        return
    if path.kernels != "native":
        raise Incompatible(
            f"--quantization {quantization} needs our CPU kernels, in float32 or bfloat16; this worker computes with "
            f"{path.kernels}: leave it out, or let the worker have --device cpu and --attention native",
            param="quantization",
        )
    layers: Literal["Q8_0", "Q4_1"] = "Q8_0" if quantization == "int8" else "Q4_1"
    of_layers, of_head = (partial(_pack_rounded, path.pack_weight, block_format) for block_format in (layers, "Q8_0"))
    model.pack(wrap(of_layers), wrap(of_head), pack_layer, pack_exact)


def weights_place(
    config: EngineConfig, checkpoint: Checkpoint, path: DevicePath, dtype: torch.dtype, part: ModelPart | None = None
) -> KeptWeights | None:
    """Where the packed weights of a model, or of a rank's part of it, are kept; None: nowhere."""
    directory = config.prepared_weights
    is_offloaded = config.offload is not None or config.host_weights > 0
    if directory is None or path.packing is None or config.weights == "dummy" or is_offloaded:
        return None
    return kept_weights(directory, checkpoint, dtype, part, path.packing)


def _pack_rounded(
    pack_weight: PackWeight, block_format: Literal["Q8_0", "Q4_1"], weight: Tensor | Blocks
) -> Multiply | None:
    """A `PackWeight` that rounds first, where the inputs divide into blocks."""
    if isinstance(weight, Blocks):
        return pack_weight(weight)
    return pack_weight(quantised(weight, block_format) or weight)


def _torch_attention(config: EngineConfig) -> SdpaBackend:
    return SdpaBackend(config.block_tokens, config.device)


def _attends(backend: Backend, model: ModelConfig, context_tokens: int) -> bool:
    """Whether a back end of ours attends as the model does; else torch attends, and the log says so."""
    need = need_of(model, context_tokens)
    if attends(backend, need).is_own:
        return True
    what = {"windows": "windows", "latents": "latents", "caps": "capped scores", "full": "attention"}[need]
    logger.info("attention.by_torch", extra={"reason": f"our kernels attend without the model's {what}"})
    return False


def _native_path(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, context_tokens: int) -> DevicePath:
    from halfmoon.engine.native.attention import NativeBackend
    from halfmoon.engine.native.compiler import compiled
    from halfmoon.engine.native.layer_ops import native_ops
    from halfmoon.engine.native.library import NativeLibrary
    from halfmoon.engine.native.sampling import native_sampler

    if config.device != "cpu":
        raise Incompatible(f"the native kernels compute on a CPU, not on {config.device}")
    library = NativeLibrary(compiled(default_cache_dir()), dtype, torch.get_num_threads())

    def use_threads(num_threads: int) -> None:
        """Leaves nothing to OpenMP, whose threads would wait for those of other threads of the process (team.h)."""
        library.num_threads = num_threads
        torch.set_num_threads(1)

    attention: AttentionBackend
    if _attends("native", model, context_tokens):
        attention = NativeBackend(library, config.block_tokens, model.num_heads, model.num_kv_heads, model.head_dim)
    else:
        attention = _torch_attention(config)
    packing = Packing(library.packing, library.packed_weight)
    sampler = native_sampler(library)
    return DevicePath("native", native_ops(library), library.pack_weight, attention, packing, use_threads, sampler)


def _triton_path(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, context_tokens: int) -> DevicePath:
    from halfmoon.engine.attention.triton_attention import TritonBackend
    from halfmoon.engine.kernels import decode_attention, latent_attention
    from halfmoon.engine.models.triton_ops import TRITON_OPS

    attention: AttentionBackend = _torch_attention(config)
    if _attends("triton", model, context_tokens):
        num_programs, per_sm = model.num_kv_heads, decode_attention.PROGRAMS_PER_SM
        if model.latent is not None:
            memory = dtype if config.kv_dtype == "auto" else TORCH_DTYPES[config.kv_dtype]
            num_programs = -(-model.num_heads // latent_attention.row_tile(model.num_heads, memory))
            per_sm = latent_attention.PROGRAMS_PER_SM
        attention = TritonBackend(
            config.block_tokens, num_programs, context_tokens, config.device, config.mixed_attention, per_sm
        )
    return DevicePath("triton", TRITON_OPS, pack_onednn, attention)


def _flex_attention(config: EngineConfig, model: ModelConfig, context_tokens: int) -> AttentionBackend:
    from halfmoon.engine.attention.flex_attention import FlexBackend, can_compile  # torch takes a second to import it

    if not _attends("flex", model, context_tokens):
        return _torch_attention(config)
    compiles = can_compile(config.device, config.block_tokens)
    if not compiles:
        reason = "no C++ compiler, no AVX2, or --block-tokens is no multiple of 16"
        logger.warning("flex_attention.uncompiled", extra={"reason": reason})
    return FlexBackend(config.block_tokens, config.device, compiles)


@torch.inference_mode()
def capture_decode(
    config: EngineConfig, model_config: ModelConfig, model: Model, arena: KVArena, attention: AttentionBackend
) -> DecodeSteps | None:
    """Decode steps as CUDA graphs if they are enabled and possible."""
    if not (arena.tensor.is_cuda and records_decodes(config, model_config)):
        return None
    from halfmoon.engine.attention.triton_attention import TritonBackend
    from halfmoon.engine.cuda_graphs import CudaCapture, DecodeGraphs

    if not isinstance(attention, TritonBackend):
        return None
    forward = partial(model.forward, kv=arena.tensor)
    return DecodeGraphs(forward, attention, config.max_running, CudaCapture())


def compile_ahead(runner: ModelRunner, arena: KVArena, layout: KVLayout, context_tokens: int) -> None:
    """Runs what Triton compiles when it first occurs, so that no request waits for a compiler. The arena is empty.

    The tiles of prompts' attention depend on their rows, from 16 to 128 for each KV head, whatever the model. KV is
    copied out and in again by two kernels more.
    """
    most = min(_TILED_TOKENS, context_tokens, arena.num_blocks * arena.block_tokens)
    for length in (1 << power for power in range(1, most.bit_length())):
        blocks = range(layout.num_blocks(length))
        with torch.inference_mode():
            runner.forward(runner.batch([Chunk([0] * length, 0, blocks, num_logits=1)]))
    runner.finish()
    part = KVSlice(0, layout.num_layers, 0, 1)
    arena.write([0], part, arena.read([0], part))


def records_decodes(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether decode steps are to be recorded: the host must neither read from the device in a step nor fetch for it.

    A mixture of experts reads back how many tokens each expert has, and a layer asks for weights on the host.
    """
    if not config.cuda_graphs or config.attention_backend != "triton" or config.host_weights:
        return False
    if model.experts is not None and any(model.experts.in_layer):
        logger.info("cuda_graphs.off", extra={"reason": "experts are chosen on the host"})
        return False
    return True
