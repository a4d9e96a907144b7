"""The mixture of a model: which layers have one, and how experts are chosen. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.architectures.config_fields import Raw, count, flag, listed, required
from halfmoon.architectures.model_config import Experts
from halfmoon.errors import Incompatible


def llama_experts(raw: Raw, architecture: str, num_layers: int) -> Experts:
    """Mixtral's, Qwen2-MoE's and Qwen3-MoE's. Raises Incompatible for experts that cannot be chosen."""
    if architecture == "MixtralForCausalLM":
        return checked(
            Experts(
                num_experts=count(raw, "num_local_experts", 8),
                num_chosen=count(raw, "num_experts_per_tok", 2),
                intermediate_size=required(raw, "intermediate_size"),
                in_layer=(True,) * num_layers,
                normalised=True,
                names="mixtral",
            )
        )
    is_second = architecture == "Qwen2MoeForCausalLM"
    dense, step = listed(raw, "mlp_only_layers", int), count(raw, "decoder_sparse_step", 1)
    shared = count(raw, "shared_expert_intermediate_size", 5632, least=0) if is_second else 0
    return checked(
        Experts(
            num_experts=num_experts_of(raw, ("num_experts", "num_local_experts"), 60 if is_second else 128),
            num_chosen=count(raw, "num_experts_per_tok", 4 if is_second else 8),
            intermediate_size=count(raw, "moe_intermediate_size", 1408 if is_second else 768),
            in_layer=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
            normalised=flag(raw, "norm_topk_prob", False),
            shared_intermediate_size=shared,
            is_shared_gated=is_second,
        )
    )


def num_experts_of(raw: Raw, names: Sequence[str], default: int) -> int:
    """The first of several spellings that is there. Raises Incompatible."""
    name = next((name for name in names if raw.get(name) is not None), names[0])
    return count(raw, name, default)


def checked(experts: Experts) -> Experts:
    """Raises Incompatible if fewer experts are there than are to be chosen."""
    groups = experts.num_groups
    if experts.num_experts % groups or not 0 < experts.num_chosen_groups <= groups:
        raise Incompatible(
            f"config.json: {experts.num_chosen_groups} of {groups} groups cannot be chosen of {experts.num_experts} "
            "experts (n_group, topk_group, n_routed_experts)",
            param="topk_group",
        )
    choice = experts.num_experts // groups * experts.num_chosen_groups
    if experts.num_chosen > choice:
        raise Incompatible(
            f"config.json: {experts.num_chosen} experts cannot be chosen of {choice} (num_experts_per_tok)",
            param="num_experts_per_tok",
        )
    return experts
