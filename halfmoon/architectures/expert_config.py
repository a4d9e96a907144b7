"""The mixture of a model: which layers have one, and how experts are chosen. Torch-free."""

from __future__ import annotations

from halfmoon.architectures.config_fields import Raw, required
from halfmoon.architectures.model_config import Experts
from halfmoon.errors import Incompatible


def llama_experts(raw: Raw, architecture: str, num_layers: int) -> Experts:
    """Mixtral's, Qwen2-MoE's and Qwen3-MoE's. Raises Incompatible for experts that cannot be chosen."""
    if architecture == "MixtralForCausalLM":
        return checked(
            Experts(
                num_experts=int(raw.get("num_local_experts") or 8),
                num_chosen=int(raw.get("num_experts_per_tok") or 2),
                intermediate_size=required(raw, "intermediate_size"),
                in_layer=(True,) * num_layers,
                normalised=True,
                names="mixtral",
            )
        )
    is_second = architecture == "Qwen2MoeForCausalLM"
    number = raw.get("num_experts") or raw.get("num_local_experts")  # transformers 5 writes the latter
    dense, step = raw.get("mlp_only_layers") or (), int(raw.get("decoder_sparse_step") or 1)
    shared = int(raw.get("shared_expert_intermediate_size", 5632)) if is_second else 0
    return checked(
        Experts(
            num_experts=int(number or (60 if is_second else 128)),
            num_chosen=int(raw.get("num_experts_per_tok") or (4 if is_second else 8)),
            intermediate_size=int(raw.get("moe_intermediate_size") or (1408 if is_second else 768)),
            in_layer=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
            normalised=bool(raw.get("norm_topk_prob", False)),
            shared_intermediate_size=shared,
            is_shared_gated=is_second,
        )
    )


def checked(experts: Experts) -> Experts:
    """Raises Incompatible if fewer experts are there than are to be chosen."""
    groups = experts.num_groups
    if experts.num_experts % groups or not 0 < experts.num_chosen_groups <= groups:
        raise Incompatible(
            f"config.json: {experts.num_chosen_groups} of {groups} groups cannot be chosen of {experts.num_experts} "
            "experts"
        )
    choice = experts.num_experts // groups * experts.num_chosen_groups
    if experts.num_chosen > choice:
        raise Incompatible(f"config.json: {experts.num_chosen} experts cannot be chosen of {choice}")
    return experts
