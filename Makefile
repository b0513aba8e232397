# What each target does: make help
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
PORT ?= 8000
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -c constraints.txt
SITE := book/_build/html/.nojekyll
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
SITE_SOURCES := $(NOTEBOOKS) $(wildcard book/*.md book/*.yml book/*.bib book/_static/*.*) \
	tools/book.py tools/site.py package-lock.json $(shell find src -name '*.py' -o -name '*.toml')

.PHONY: help serve book test exercises lint notebooks colab bench repository clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

serve: $(SITE) ## Set up, build the book and serve it on this machine (PORT=8000)
	$(BIN)/python -m tools.serve --port $(PORT)

book: $(SITE) ## Set up and build the book into book/_build/html

test: $(VENV)/test.stamp lint ## Set up and run every test (about 21 minutes on 2 cores)
	$(BIN)/python -m pytest

exercises: $(VENV)/test.stamp ## Test your solutions in exercises/student.py
	$(BIN)/python -m pytest exercises

lint: $(VENV)/test.stamp ## Check the style of code and notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

notebooks: $(VENV)/test.stamp ## Run every notebook again and store its outputs in one normal form
	$(BIN)/python -m tools.notebooks $(NOTEBOOKS)

colab: $(VENV)/test.stamp ## Run every notebook as on Colab: its versions, an empty folder, a wheel
	$(BIN)/python -m tools.colab

bench: $(VENV)/test.stamp ## Print the speed beside the alternatives, as ratios
	for script in benchmarks/bench_*.py; do $(BIN)/python "$$script" || exit 1; done

repository: $(VENV)/book.stamp ## Set the address of the repository everywhere: URL=https://github.com/...
	$(BIN)/python -m tools.repository "$(URL)"

clean: ## Remove everything that was built or installed here
	rm -rf $(VENV) node_modules book/_build book/_static/vendor build dist src/*.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(SITE): $(VENV)/book.stamp $(SITE_SOURCES)
	$(BIN)/python -m tools.book

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name it with: make PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "This Python cannot make environments; on Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/book.stamp: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "== installing what builds the book: some 100 packages, 550 MB on disk, a minute or two"
	$(PIP_INSTALL) -e '.[book]'
	@touch $@

# Apart from the book, because torch is large. TORCH_INDEX_URL chooses another source of torch
# alone, such as the CPU-only builds at https://download.pytorch.org/whl/cpu.
$(VENV)/test.stamp: $(VENV)/book.stamp
	@echo "== installing what runs the tests: torch and Jupyter, 1.2 GB on disk, minutes (3 GB more with CUDA)"
	$(if $(TORCH_INDEX_URL),$(PIP_INSTALL) --no-deps --index-url $(TORCH_INDEX_URL) torch)
	$(PIP_INSTALL) -e '.[test]'
	@touch $@
