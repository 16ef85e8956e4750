# Everything runs in .venv, which `make setup` creates and keeps up to date.
PYTHON ?= python3
CONFIG ?= configs/tiny.yaml
BIN := .venv/bin
# The newest torch that comes without CUDA where there is a build for CPUs. Empty: the newest that pyproject.toml allows.
TORCH ?= 'torch<2.14'

.PHONY: setup serve demo demo-vectors demo-audio test test-extended vllm sglang lint bench manifests api-fuzz openapi-client fuzz audit \
	screenshot soak soak-service soak-nodes chaos overload refusals hostile lock wheels release

setup: .venv/.installed

.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' $(TORCH)
	touch $@

# Serves in the foreground on ports 8000 and 9000 until Ctrl-C.
serve: setup
	umask 077; RAY_ADDRESS=local $(BIN)/serve run $(CONFIG)

demo: setup
	RAY_SERVE_ENABLE_HA_PROXY=1 tests/loopback $(BIN)/python -m tests.demo

demo-vectors: setup
	RAY_SERVE_ENABLE_HA_PROXY=1 tests/loopback $(BIN)/python -m tests.demo vectors

demo-audio: setup
	RAY_SERVE_ENABLE_HA_PROXY=1 tests/loopback $(BIN)/python -m tests.demo audio

# Two workers: tests/conftest.py says what each runs.
PYTEST := OMP_NUM_THREADS=1 tests/loopback $(BIN)/pytest -n 2 --dist loadscope

# ALL=1: with those of test-extended in the same run, in which workers and clusters start once.
test: setup
	$(PYTEST) $(if $(ALL),-m 'not gpu and not slow and not engine')

# The rest: chats, videos, two paths, manifests, the status page, fuzzing.
test-extended: setup
	$(PYTEST) -m 'extended and not gpu and not slow'

# Embeddings, proxy and connector in vLLM itself, in an environment of its own: CONTRIBUTING.md. Then vLLM in our service.
VLLM_PYTHON ?= .venv-vllm/bin/python
vllm: setup
	OMP_NUM_THREADS=1 VLLM_PYTHON=$(VLLM_PYTHON) tests/loopback $(BIN)/pytest -m engine tests/engines/test_vllm.py
	OMP_NUM_THREADS=1 VLLM_PYTHON=$(VLLM_PYTHON) tests/loopback $(VLLM_PYTHON) -m pytest -m engine \
		tests/engines/test_vllm_chat.py

# Embeddings in SGLang's own code, in an environment of its own. Starts no engine.
SGLANG_PYTHON ?= .venv-sglang/bin/python
sglang: setup
	OMP_NUM_THREADS=1 tests/loopback $(SGLANG_PYTHON) -m pytest -W ignore -m engine \
		tests/engines/test_sglang.py tests/engines/test_sglang_encoder.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	! git grep -nE '^(<<<<<<<|>>>>>>>) '  # left by a merge

bench: setup
	tests/loopback $(BIN)/encoder-service bench serve --config $(CONFIG)

# Minutes of load while parts of the service die. Prints the outcome of the requests.
chaos: setup
	tests/loopback $(BIN)/python -m tests.chaos

# Memory of a service under load, for example `make soak-service SECONDS=300`.
soak-service: setup
	tests/loopback $(BIN)/python -m tests.soak_service $(SECONDS:%=--seconds %)

# Two nodes under light load; once a minute a process or a node is killed: make soak-nodes SECONDS=7200.
soak-nodes: setup
	tests/loopback nice $(BIN)/python -m tests.soak_nodes $(SECONDS:%=--seconds %)

# Five times the load that the service can carry. Prints goodput, waiting times and rejections.
overload: setup
	tests/loopback $(BIN)/python -m tests.overload

# CPU time of one rejection (429), by process.
refusals: setup
	tests/loopback $(BIN)/python -m tests.refusals

# Clients that mean harm: endless headers, slow bodies, unread answers. Prints how long others wait.
hostile: setup
	tests/loopback $(BIN)/python -m tests.hostile

# Writes the served configuration of the Kustomize overlays from configs/.
manifests: setup
	$(BIN)/encoder-service rayservice configs/tiny.yaml > k8s/overlays/dev/serve-config.yaml
	$(BIN)/encoder-service rayservice configs/qwen3vl-fleet.yaml > k8s/overlays/gpu/serve-config.yaml

# Writes docs/status.png. Needs Debian's chromium and chromium-driver.
screenshot: setup
	tests/loopback $(BIN)/python -m tests.screenshot

# 10,000 embeddings: object store and process memory must end where they began. Takes minutes.
soak: setup
	OMP_NUM_THREADS=1 tests/loopback $(BIN)/pytest -s -m slow tests/serve/test_soak.py

# Sends requests that the OpenAPI document allows, and some that it does not, to the front door.
api-fuzz: setup .venv-security/.installed
	tests/loopback $(BIN)/python -m tests.fuzz.api .venv-security/bin/schemathesis run '{url}' \
		--header 'Authorization: Bearer open' --exclude-checks positive_data_acceptance \
		--max-examples 50 --seed 1 --no-color

# A client that openapi-python-client generates sends an image and reads its rows.
openapi-client: setup .venv-openapi/.installed
	tests/loopback $(BIN)/python -m tests.fuzz.api .venv-openapi/bin/python -m tests.generated_client '{url}'

.venv-openapi/.installed: Makefile
	test -x .venv-openapi/bin/python || $(PYTHON) -m venv .venv-openapi
	.venv-openapi/bin/python -m pip install --quiet --disable-pip-version-check 'openapi-python-client>=0.29'
	touch $@

# Fuzzes everything that parses bytes, FUZZ_SECONDS per target: tests/fuzz/__main__.py.
FUZZ_SECONDS ?= 60
FUZZ ?= image video decoder http_json http_msgpack http_form http_image http_accept grpc grpc_response response \
	url redirect authorize
fuzz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3'
	for target in $(FUZZ); do $(BIN)/python -m tests.fuzz $$target .fuzz/$$target \
		-max_total_time=$(FUZZ_SECONDS) -max_len=8192 -verbosity=0 -print_final_stats=1 || exit 1; done

# Known vulnerabilities of installed packages and of the image's, and an SBOM (CycloneDX). Needs the network.
audit: setup .venv-security/.installed
	.venv-security/bin/cyclonedx-py environment $(BIN)/python --output-file sbom.json
	.venv-security/bin/pip-audit --path $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])') --progress-spinner off
	.venv-security/bin/pip-audit --require-hashes --disable-pip -r k8s/requirements.lock --progress-spinner off

# Pins what the image installs, with hashes: the newest packages that pyproject.toml allows. Needs the network.
LOCK := .venv-security/bin/uv pip compile --quiet --upgrade --generate-hashes --only-binary :all: \
	--no-python-downloads --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
	--custom-compile-command 'make lock'
lock: .venv-security/.installed
	$(LOCK) pyproject.toml --extra cache --extra otel --output-file k8s/requirements.lock
	echo hatchling | $(LOCK) - --output-file k8s/build.lock

# The service, and the client alone.
wheels: setup
	rm -rf dist
	for project in . packages/client; do $(BIN)/python -m build --wheel --outdir dist $$project >/dev/null || exit 1; done

# Wheels, an SBOM of the image's packages and checksums in dist/, then the image, on BASE if it is set.
BUILDER ?= $(firstword $(foreach name,docker podman buildah,$(shell command -v $(name))))
release: wheels .venv-security/.installed
	.venv-security/bin/cyclonedx-py requirements k8s/requirements.lock --pyproject pyproject.toml \
		--output-file dist/sbom.json
	cd dist && sha256sum *.whl sbom.json > SHA256SUMS
	version=$$($(BIN)/python -c 'import encoder_service; print(encoder_service.__version__)'); \
	if [ -n "$(BUILDER)" ]; then \
		$(BUILDER) build -f k8s/Dockerfile $(BASE:%=--build-arg BASE=%) -t encoder-service:$$version .; \
	else echo "No image: install docker, podman or buildah, then repeat make release."; fi

# Security tools in an environment of their own, because their dependencies are not ours.
.venv-security/.installed: Makefile
	test -x .venv-security/bin/python || $(PYTHON) -m venv .venv-security
	.venv-security/bin/python -m pip install --quiet --disable-pip-version-check \
		'schemathesis>=4.32' 'pip-audit>=2.10' 'cyclonedx-bom>=7.5' 'uv>=0.9'
	touch $@
