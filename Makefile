# Two commands do everything, on a fresh machine too:  make run   and   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/first

.PHONY: run test check proofs three-hosts format reference models whole reproduce reproduce-quick clean

run: $(VENV)/.ready  ## train the default model on WikiText-2, measure it, let it write
	$(BIN)/blocktrain train --out $(RUN) --reference-line docs/reference.jsonl
	$(BIN)/blocktrain audit $(RUN)
	$(BIN)/blocktrain generate $(RUN) "The history of the " --length 400

test: $(VENV)/.ready-dev  ## every test of the ordinary suite
	sh tests/system.sh
	$(BIN)/pytest -n 2 --dist loadfile

check: $(VENV)/.ready-dev  ## what pre-commit and CI check besides the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proofs: $(VENV)/.ready-dev  ## the numbers of issue size: compute, memory, learning; about an hour
	$(BIN)/pytest proofs --timeout 7200 -rP

three-hosts: $(VENV)/.ready  ## train across three hosts with a WAN between them; needs root
	$(BIN)/blocktrain bench three-hosts --out runs/three-hosts --rounds 24 --first-steps 0 --grams 4 --gram-rows 1024

format: $(VENV)/.ready-dev  ## let ruff do what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(VENV)/.ready  ## train the reference line of `make run`'s plot again (docs/reference.jsonl)
	$(BIN)/blocktrain lab --blocks 1 --layers 4 --rounds 40 --first-steps 0 --codec fp32 --out runs/reference
	cp runs/reference/history.jsonl docs/reference.jsonl

models: $(VENV)/.ready  ## train the small model and the judge of the serving tests again (models/); single bytes keep them small
	$(BIN)/blocktrain lab --grams 1 --matrix 0.02 --rounds 127 --reference --out runs/models
	rm -f models/small/* models/judge/*
	cp runs/models/manifest.json runs/models/block-*.safetensors models/small/
	$(BIN)/blocktrain refit models/small --blocks 1-2
	cp runs/models/reference/manifest.json runs/models/reference/block-*.safetensors models/judge/

whole: $(VENV)/.ready  ## train the model that `bench wan` generates whole texts with (runs/whole); 13 core-minutes
	$(BIN)/blocktrain lab --objective denoise --window 512 --batch 4 --span 384 --masked-share 0.75 --rounds 80 --first-steps 0 --out runs/whole

reproduce: $(VENV)/.ready  ## every row of docs/results.md from nothing; about a day on two cores, goes on when stopped
	$(BIN)/blocktrain reproduce

reproduce-quick: $(VENV)/.ready  ## a small version of it in less than twenty minutes, into runs/reproduce-quick
	$(BIN)/blocktrain reproduce --quick

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 run")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:  ## forget the environment and all runs
	rm -rf $(VENV) runs
