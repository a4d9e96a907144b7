# The project's commands. They set up all they need in .venv.
.PHONY: up test test-vllm
up test test-vllm: export PATH := $(CURDIR)/.venv/bin:$(PATH)

up:
	@scripts/setup
	@exec .venv/bin/halfmoon up $(ARGS)

test:
	@scripts/setup --dev
	@scripts/test $(ARGS)

# The tests that need vLLM, in an environment of its own (3.5 GB).
test-vllm:
	@scripts/setup --dev
	@test -e .venv-vllm/bin/python || scripts/vllm_env .venv-vllm
	@HALFMOON_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python .venv/bin/pytest tests/vllm_engine tests/e2e/test_vllm_pairs.py $(ARGS)
