"""What others are told of a worker's engine."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.kv.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine serves, and its limits. Counts of tokens are the most of each kind."""

    model: str  # the model's own name
    fingerprint: str  # of the model
    layout: KVLayout
    context_tokens: int  # of prompt and output
    num_blocks: int
    num_readable_blocks: int  # from which other workers may read prefixes
    step_tokens: int  # of a step
    chunk_tokens: int  # prompt tokens of a step beside decodes
    max_running: int
    device: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: int = 1
    layer_passes: int = 0  # parts in which layers of a load arrive while its step computes; 0: no step waits for them
    follows_targets: bool = False  # `chunk_tokens` is replaced by what TBT targets leave
    nests_steps: bool = False  # short prompts run in the middle of prefill steps (`policy/nested_step.py`)
    host_weights: float = 0.0  # share of the layers whose weights are in host memory, as configured or chosen
    adapters: tuple[str, ...] = ()  # fingerprints of those that it computes with
