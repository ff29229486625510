# The same scripts serve people and CI. `make serve ARGS="--port 9000"` passes flags on.
.PHONY: serve test soak check format setup

serve:
	@scripts/setup
	@exec .venv/bin/radixserve serve $(ARGS)

test:
	@scripts/setup --dev
	@scripts/test $(ARGS)

# Minutes of twice the load: SOAK_SECONDS=300 make soak
soak:
	@scripts/setup --dev
	@scripts/test -m soak -s tests/e2e/test_soak.py

check:
	@scripts/setup --dev
	@scripts/check

format:
	@scripts/setup --dev
	@scripts/format

setup:
	@scripts/setup --dev
