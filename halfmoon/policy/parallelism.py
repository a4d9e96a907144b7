"""How a model's heads, inner units and layers can be dealt out to the devices of one worker."""

from __future__ import annotations

from halfmoon.errors import Incompatible


def check_parallelism(
    tensor: int, pipeline: int, *, num_heads: int, num_kv_heads: int, intermediate_size: int, num_layers: int
) -> None:
    """`tensor` devices share each layer, `pipeline` stages have some of the layers each.

    Raises Incompatible unless that is even enough: ranks beyond the KV heads hold copies of them.
    """
    for count, what in ((num_heads, "attention heads"), (intermediate_size, "inner units")):
        if count % tensor:
            raise Incompatible(
                f"tensor parallelism {tensor} does not divide the model's {count} {what}", param="tensor_parallel"
            )
    if num_kv_heads % tensor and tensor % num_kv_heads:
        raise Incompatible(
            f"tensor parallelism {tensor} neither divides the model's {num_kv_heads} key-value heads nor is a "
            "multiple of them",
            param="tensor_parallel",
        )
    if num_layers < pipeline:
        raise Incompatible(
            f"pipeline parallelism {pipeline} exceeds the model's {num_layers} layers", param="pipeline_parallel"
        )
