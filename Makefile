# Everything a newcomer needs. Only relative paths below, so that a checkout in a path with spaces works.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN = .venv/bin/python -m
INSTALLED = .venv/.installed
SGLANG_CPU = .venv/.sglang-cpu
TRL = .venv-trl/.installed
HARBOR = .venv-harbor/.installed
# A Python that Harbor runs on: the first of these that starts and is new enough.
HARBOR_PYTHON ?= $(shell for python in python3.12 python3.13 python3.14 "$$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do \
	"$$python" -c 'import sys; assert sys.version_info >= (3, 12); print(sys.executable)' 2> /dev/null && break; done)

.PHONY: demo test test-fast test-harbor soak lint bench bench-gateway bench-ledger bench-trl install sglang-cpu postgres harbor sandbox clean

demo: $(INSTALLED)  ## set up, run the whole loop, see the model learn
	$(RUN) recipes.arithmetic.demo

test: lint postgres sandbox sglang-cpu  ## set up, check style, types and floors, run every test
	$(MAKE) test-fast
	$(RUN) pytest -m "slow or gpu"
	@test -z "$$CI$(HARBOR_PYTHON)" && echo "No Python >= 3.12 is here, so Harbor's tests are skipped: make test-harbor" \
	|| $(MAKE) test-harbor

test-fast: $(INSTALLED)  ## about two minutes on two cores: no Ray, and one shared record-only service
	$(RUN) pytest -n 2 --dist loadfile -m "not slow and not gpu"

test-harbor: $(INSTALLED) $(HARBOR) sandbox  ## Harbor's own command and agents against the real service
	.venv-harbor/bin/python -m pytest -c harness/harbor_tests/pytest.ini harness/harbor_tests

soak: $(INSTALLED)  ## for hours: kill -9 of everybody at every point, then 200 times at random; nothing is lost or done twice
	REEF_EXAMPLES=others $(RUN) pytest -m "not slow and not gpu"
	REEF_STALLS=$$$$ $(RUN) pytest -p tests.stalls -n 2 --dist loadfile -m "not slow and not gpu"
	REEF_CRASH=all $(RUN) pytest -s tests/crash/test_matrix.py -k any_point
	$(RUN) tests.crash.soak --kills 200

lint: $(INSTALLED)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports

bench-ledger: $(INSTALLED)  ## a ledger of a million receipts beside one of a thousand
	$(RUN) benchmarks.ledger

bench-gateway: $(INSTALLED)  ## requests/s and added latency beside a stub engine and a bare gateway
	$(RUN) benchmarks.gateway

bench-trl: $(INSTALLED) $(TRL)  ## wall clock to the same accuracy beside TRL's GRPOTrainer, in a venv of its own
	$(RUN) benchmarks.trl

bench: sglang-cpu  ## every figure in docs/performance.md, each beside its reference
	$(RUN) benchmarks

install: $(INSTALLED)

sglang-cpu: $(SGLANG_CPU)  ## SGLang for a machine without a GPU, beside the rest

postgres:  ## the server that tests of a shared ledger start; where it cannot be installed they are skipped
	@ls /usr/lib/postgresql/*/bin/postgres > /dev/null 2>&1 \
	|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq \
	     && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql; } \
	|| echo "PostgreSQL is not installed (Debian: apt-get install postgresql): its tests are skipped"

harbor: $(HARBOR)  ## Harbor with the harness, in a venv of their own: it needs Python 3.12 or newer

sandbox:  ## what keeps graded code, and Harbor's tasks, apart from this machine; else their tests are skipped
	@{ command -v bwrap && command -v tmux; } > /dev/null 2>&1 \
	|| { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq \
	     && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq bubblewrap tmux; } \
	|| echo "bubblewrap and tmux are not installed (Debian: apt-get install bubblewrap tmux): their tests are skipped"

$(INSTALLED): pyproject.toml harness/pyproject.toml constraints.txt
	"$(PYTHON)" -c 'import sys; sys.exit("Reef needs Python 3.11 or 3.12, found " + sys.version) if sys.version_info[:2] not in ((3, 11), (3, 12)) else None'
	"$(PYTHON)" -m venv .venv
	$(RUN) pip install --quiet --constraint constraints.txt --editable './harness[plot,json-schema,math-verify]' \
		--editable '.[dev,wandb]'
	touch $(INSTALLED)

$(SGLANG_CPU): $(INSTALLED) requirements-sglang-cpu.txt
	$(RUN) pip install --quiet --no-deps --requirement requirements-sglang-cpu.txt
	touch $(SGLANG_CPU)

$(TRL): requirements-trl.txt harness/pyproject.toml
	"$(PYTHON)" -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --requirement requirements-trl.txt --editable ./harness
	touch $(TRL)

$(HARBOR): requirements-harbor.txt harness/pyproject.toml
	@test -n "$(HARBOR_PYTHON)" \
	|| { echo "Harbor needs Python 3.12 or newer, and none was found: say HARBOR_PYTHON=/path/to/python" >&2; exit 1; }
	"$(HARBOR_PYTHON)" -m venv --clear .venv-harbor
	.venv-harbor/bin/python -m pip install --quiet --requirement requirements-harbor.txt --editable './harness[harbor]'
	touch $(HARBOR)

clean:  ## remove what was set up and what was made
	rm -rf .venv .venv-trl .venv-harbor work build *.egg-info harness/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
