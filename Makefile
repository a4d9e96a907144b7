# The project's two commands. Both set up all they need in .venv.
.PHONY: up test
up test: export PATH := $(CURDIR)/.venv/bin:$(PATH)

up:
	@scripts/setup
	@exec .venv/bin/halfmoon up $(ARGS)

test:
	@scripts/setup --dev
	@scripts/test $(ARGS)
