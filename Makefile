# Everything runs in .venv, which `make setup` makes and keeps up to date.
PYTHON ?= python3
CONFIG ?= configs/tiny.yaml
BIN := .venv/bin

.PHONY: setup serve demo test lint bench manifests screenshot soak chaos

setup: .venv/.installed

.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

# In the foreground, on ports 8000 and 9000, until Ctrl-C.
serve: setup
	$(BIN)/serve run $(CONFIG)

demo: setup
	tests/loopback $(BIN)/python -m tests.demo

test: setup
	OMP_NUM_THREADS=1 tests/loopback $(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	tests/loopback $(BIN)/encoder-service bench serve --config $(CONFIG)

# Minutes of load while parts of the service die; prints what became of the requests.
chaos: setup
	tests/loopback $(BIN)/python -m tests.chaos

# What Kustomize's overlays serve, from configs/.
manifests: setup
	$(BIN)/encoder-service rayservice configs/tiny.yaml > k8s/overlays/dev/serve-config.yaml
	$(BIN)/encoder-service rayservice configs/qwen3vl-fleet.yaml > k8s/overlays/gpu/serve-config.yaml

# docs/status.png. Needs Debian's chromium and chromium-driver.
screenshot: setup
	tests/loopback $(BIN)/python -m tests.screenshot

# 10,000 embeddings: the object store and the processes must end where they began. Minutes.
soak: setup
	OMP_NUM_THREADS=1 tests/loopback $(BIN)/pytest -s -m slow tests/serve/test_soak.py
