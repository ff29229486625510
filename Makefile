# The same scripts serve people and CI. `make serve ARGS="--port 9000"` passes flags on.
.PHONY: serve test check format setup

serve:
	@scripts/setup
	@exec .venv/bin/radixserve serve $(ARGS)

test:
	@scripts/setup --dev
	@scripts/test $(ARGS)

check:
	@scripts/setup --dev
	@scripts/check

format:
	@scripts/setup --dev
	@scripts/format

setup:
	@scripts/setup --dev
