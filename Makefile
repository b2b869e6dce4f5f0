# `make demo` and `make test` set themselves up; `make env` alone builds the environment that both use.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.pins

.PHONY: env demo test test-all test-gpu recipes clean
env: $(STAMP)

$(STAMP): tools/make_env.sh tools/constraints-cpu.txt tools/constraints-nemo-run.txt setup.py
	@tools/make_env.sh $(VENV)

demo: env
	@tools/demo.sh

test: env
	@$(PY) -m pytest -m "not gpu and not slow" $(ARGS)

test-all: env
	@$(PY) -m pytest $(ARGS)

test-gpu:
	@python3 -m pytest tests/gpu $(ARGS)

recipes: env
	@$(PY) tools/run_recipes.py $(ARGS)

clean:
	rm -rf out build dist *.egg-info
