"""How the heads, inner units and layers of a model are split over the devices of one worker."""

from __future__ import annotations

from halfmoon.errors import Incompatible


def check_parallelism(
    tensor: int, pipeline: int, *, num_heads: int, num_kv_heads: int, intermediate_size: int, num_layers: int
) -> None:
    """Checks that `tensor` devices can share each layer, and `pipeline` stages the layers.

    Raises Incompatible if heads or inner units do not divide evenly. Ranks beyond the number of KV heads hold copies.
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
