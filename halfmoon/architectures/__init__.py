"""What a Hugging Face `config.json` says of a model: the one reading that engine and planner share. No torch, no I/O.

Read in this order: model_config, config_json, llama_config, expert_config, deepseek_config, gemma_config.
"""
