# The project's commands. They set up all they need in .venv.
.PHONY: up test test-vllm
up test test-vllm: export PATH := $(CURDIR)/.venv/bin:$(PATH)

up:
	@scripts/setup
	@exec .venv/bin/halfmoon up $(ARGS)

test:
	@scripts/setup --dev
	@scripts/test $(ARGS)

# The tests that need vLLM, in an environment of its own (3.5 GB); then those of the API that any engine has to pass.
test-vllm:
	@scripts/setup --dev
	@test -e .venv-vllm/bin/python || scripts/vllm_env .venv-vllm
	@HALFMOON_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python .venv/bin/pytest tests/vllm_engine tests/e2e/test_vllm_pairs.py $(ARGS)
	@HALFMOON_E2E_OPTIONS="--engine vllm --engine-python .venv-vllm/bin/python --engine-args=--enforce-eager --kv-memory 512MiB" \
	  .venv/bin/pytest --timeout 900 tests/e2e/test_api.py tests/e2e/test_golden.py tests/e2e/test_system.py $(ARGS)
