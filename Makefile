# `make demo` and `make test` need nothing but Python 3.10 or 3.11: they set up .venv with pinned nox and uv first.
# PYTHON=/path/to/python chooses the interpreter, ARGS="..." is passed on to the demo, JOBS=n runs n sessions side by side.

export PYTHON ARGS
NOX := .venv/bin/python -m nox
# One more than two cores: some tests wait more than they compute.
JOBS ?= 3

.PHONY: demo test test-all clean

demo: .venv/ready
	@$(NOX) -s demo -- $(ARGS)

test: .venv/ready
	@$(NOX) --parallel $(JOBS)

test-all: .venv/ready
	@$(NOX) --parallel $(JOBS) -s structure lint types slow tests integration build

clean:
	rm -rf .venv .nox dist

# A candidate may be a shim that fails when run, another version, or a Python without venv: then the next is tried.
.venv/ready: constraints.txt
	@set -- python3.11 python3.10 python3 python; \
	if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; fi; \
	for python in "$$@"; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' >/dev/null 2>&1 || continue; \
		rm -rf .venv .nox; \
		"$$python" -m venv .venv >/dev/null 2>&1 || continue; \
		echo "Setting up .venv with $$(.venv/bin/python --version) ..."; \
		.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt nox uv || exit 1; \
		touch .venv/ready; \
		exit 0; \
	done; \
	echo "error: no Python 3.10 or 3.11 with venv among: $$*; install one, or give PYTHON=/path/to/python" >&2; \
	exit 1
