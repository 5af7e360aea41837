# Every target prepares what it needs: a machine with Python 3.11 or newer is enough.
# PYTHON=... names another interpreter, ARGS=... goes to the command that is run, and
# TORCH=2.15 takes another version of torch, in an environment of its own: .venv-2.15.

PYTHON ?= python3
ARGS ?=
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
BASE := $(VENV)/.base
PACKAGES := $(VENV)/.packages
INTEGRATIONS := $(VENV)/.integrations
TOOLS := $(VENV)/.tools
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet -c $(VENV)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu check docs coverage sweep bench clean

help: ## Say what each target does
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

demo: $(BASE) ## Train a small GPT plainly and with recoup, and compare them
	@mkdir -p build
	$(RUN) -m recoup.cli.main demo --page build/demo.html $(ARGS)

# Several processes where pytest-xdist is there; conftest.py says how many.
PARALLEL = $$($(RUN) -c 'import xdist' 2>/dev/null && echo --dist load -n auto)

test: $(INTEGRATIONS) ## Run the tests (on a GPU too, if there is one)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(PARALLEL) $(ARGS)

test-gpu: ## Run the tests that need a GPU with this machine's own Python and packages
	PYTHONPATH=src $(PYTHON) -m pytest -m cuda $(ARGS)

check: $(TOOLS) ## Check format, lint, types, layers, spelling and documentation
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(VENV)/bin/pyright
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

docs: $(TOOLS) ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)

coverage: $(TOOLS) $(INTEGRATIONS) ## Run the tests once more, and require 95 % of all branches
	$(INSTALL) coverage
	$(RUN) -m coverage run -m pytest $(ARGS)
	$(RUN) -m coverage report --skip-covered

sweep: $(INTEGRATIONS) ## Run the long tests: the operator database, every model at every budget
	RECOUP_EXAMPLES=random $(RUN) -m pytest -m sweep tests $(ARGS)

bench: $(PACKAGES) ## Measure recoup beside torch.utils.checkpoint
	$(RUN) -m benchmarks.cases.overhead $(ARGS)

clean: ## Remove the environment and every cache
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Where the machine's own Python has a torch that sees a GPU, that
# torch is used: the environment reads the machine's packages through machine.pth
# (--system-site-packages is not enough: if that Python is itself in an environment,
# it would give the packages of the Python below).
MACHINE_TORCH = import pathlib, torch; assert torch.cuda.is_available(); print(pathlib.Path(torch.__file__).parents[1])
ENOUGH_PYTHON = import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"recoup needs Python 3.11 or newer, found {v[0]}.{v[1]}. Name another: make PYTHON=python3.12")
SITE_PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))

$(VENV)/.created:
	@$(PYTHON) -c '$(ENOUGH_PYTHON)'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@if test -z '$(TORCH)' && machine=$$($(PYTHON) -c '$(MACHINE_TORCH)' 2>/dev/null); then \
	  echo "Using this machine's GPU build of torch."; \
	  echo "$$machine" > "$$($(RUN) -c '$(SITE_PACKAGES)')/machine.pth"; \
	fi
	@touch $@

# Without a network nothing can be installed: then the machine's own packages have to
# do, and recoup itself is put on the path.
define install
	@site=$$($(RUN) -c '$(SITE_PACKAGES)'); \
	sed $(if $(TORCH),'s/^torch==.*/torch==$(TORCH).*/',-n p) constraints.txt > $(VENV)/constraints.txt; \
	if ! test -e "$$site/machine.pth"; then \
	  $(INSTALL) -e '$(1)'; \
	else \
	  sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt; \
	  PIP_RETRIES=1 $(INSTALL) -e '$(1)' > $(VENV)/install.log 2>&1 \
	  || { echo "Nothing could be installed ($(VENV)/install.log says why):" \
	            "using this machine's own packages."; \
	       echo "$(CURDIR)/src" > "$$site/recoup.pth"; }; \
	fi
	@touch $@
endef

# What recoup needs to run: enough for the demonstration.
$(BASE): pyproject.toml constraints.txt | $(VENV)/.created
	$(call install,.)

$(PACKAGES): $(BASE)
	$(call install,.[test])

# The frameworks that recoup has integrations for, and what their users add to them.
# Without a network their tests are skipped; torch stays the one that is there. timm needs
# torchvision, which exists for the builds of torch that TORCH=... takes.
EXTRAS = integrations,ecosystem$(if $(TORCH),$(comma)timm)
comma := ,
$(INTEGRATIONS): $(PACKAGES)
	@PIP_RETRIES=1 $(INSTALL) -e '.[$(EXTRAS)]' > $(VENV)/integrations.log 2>&1 \
	|| echo "No integrations could be installed ($(VENV)/integrations.log says why):" \
	        "their tests are skipped."
	@touch $@

$(TOOLS): $(PACKAGES)
	$(INSTALL) -e '.[lint,docs]'
	@touch $@
