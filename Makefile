# Every target sets itself up: Python 3.11+, its venv module and make are all that must be there.
#
#   make demo    train, kill in the middle of a save, resume three ways (minutes)
#   make test    the test suite (13 minutes on two processors)
#   make test-long   kills in number, power cuts, many ranks and large amounts; together with `make test`, every test
#   make check   ruff, mypy, import-linter
#   make bench   the benchmark (20 to 30 minutes, 16 GiB of memory), QUICK=1 in about 5; ONLY=large,tiny for some parts
#   make bench-interop   DeepSpeed's and DCP's checkpoints read in place and exported, beside their own tools, and loads
#                   through layouts beside plain loads (minutes); ONLY=layouts for these alone
#   make bench-scale   planning, committing and load plans of 16,384 ranks on paper, and 1,000 nodes of peers (minutes)
#   make bench-stores   saves to an object store and loads from it, beside its bare client and DCP's ways, on Ceph, which
#                   it installs and starts (25 minutes, 16 GiB of memory); QUICK=1, ONLY=store_speed for some parts; the
#                   same command continues after Ctrl-C
#   make bench-compression   what compression saves, how fast it is and what it costs, beside zipnn, zstd and DCP with
#                   ZStandard (20 minutes; the first run trains its state); QUICK=1, ONLY=ratio_state,encode_vs_zipnn.
#                   zipnn is compiled, so a C compiler and Python's headers are needed
#   make bench-differential   cost of the redo log in training, and of a kill with the log (25 minutes, 12 GiB of
#                   disk under runs/); QUICK=1, ONLY=redo_overhead,kills
#   make bench-activations   training within a budget of memory, beside checkpointing and compiled blocks, predicted and
#                   measured (about 40 minutes; a C++ compiler for the compiled ones); QUICK=1, ONLY=peaks,slowdown_vs_sac
#   make bench-tiers   saves into a near tier and loads beside a plain root, requests to the root, training beside a drain;
#                   drains to Ceph, which it installs and starts (15 minutes, 16 GiB of memory); QUICK=1, ONLY=disk or
#                   ONLY=store
#   make bench-memory  saves into a near tier in memory beside one copy of the state and a disk, restarts of killed ranks,
#                   training, memory; saves into the memory of peers beside plain sockets, lost and slow nodes (20 minutes,
#                   nothing beside it); QUICK=1, ONLY=peers_wire,peers_memory for some parts of peers
#   make page       the page in a real browser, and its times (10 minutes): Playwright and Chromium are installed where
#                   the machine allows; HOLDFAST_CHROMIUM names another one. QUICK=1
#   make bench-data   speed of the loader, cost of the data position, and resumes on other ranks beside torchdata,
#                   datasets, Grain and litdata (about 15 minutes); QUICK=1, ONLY=loader_1k,rivals
#   make bench-compare   Holdfast's own times with two checkouts in turn: BEFORE=path [AFTER=.] [ROUNDS=7]
#                   [ONLY=large,tiny] [QUICK=1]; two to three hours for all, and the same command continues after Ctrl-C
#   make integrations FRAMEWORK=accelerate   trains with a real framework through its integration: tests, examples, kills
#                   in the middle of saves, resumes on other ranks, times beside its own checkpointing (dcp, lightning,
#                   torchtitan, transformers; all: 10 minutes each). QUICK=1, ONLY=kills,measure for some parts; an
#                   environment each, as in tests/integrations/locks/, or LOCK=1 for the newest of the tested range
#   make interop   models of Transformers, Megatron-core and nanoGPT loaded through layouts: the same tensors and logits
#                   (2 minutes)
#   make fuzz    coverage-guided fuzzing of every parser, FUZZ_SECONDS=600 in all
#   make campaign   eight processes race for one root, ROUNDS=100 times; clocks set; killed and the power cut while
#                   saving, going back, discarding, overwriting, removing, collecting, fencing and repairing (ext4; XFS
#                   where xfsprogs is installed);
#                   a training told to end ROUNDS times; lives of runs drawn at random; FAULTS=1000 faults drawn
#                   for saves of trainings, FAULTS_SEED=n for the same ones again; trainings with the redo log on all
#                   layouts, killed at random a hundred times (about 140 minutes).
#                   ONLY=collecting,races for some parts; an unknown part is refused with the list of parts
#   make campaign-stores   installs Ceph, Azurite and others, and runs races, faults, kills and properties against them:
#                   ROUNDS=1000 races, FAULTS=500, KILLS=100 of each server, EXAMPLES=1000; QUICK=1 for a short one;
#                   SEED=n for the same again; ONLY=ceph,ministack/races; JOBS=2 servers side by side. Some hours,
#                   and the same command continues after Ctrl-C; results in bench/results/stores-campaign.json
#   make campaign-tiers   what a near tier must survive: KILLS=100 of a job whose root is on a server, every call of a
#                   drain, EXAMPLES=1000 lives in two places, situations with a root on Ceph, and twice KILLS power cuts
#                   on ext4, with direct writes and without (about 15 minutes).
#                   QUICK=1, SEED=n, ONLY='near on ext4,root in memory' and JOBS=2 as above, and the same command
#                   continues after Ctrl-C; results in bench/results/tiers-campaign.json
#   make campaign-memory   what a near tier in memory and its agent must survive: 30 kills of each kind of a training
#                   under FSDP2, 100 rounds of bytes that others read, orphans, the agent killed at each of its calls,
#                   nodes lost, the rules of keepers and parity EXAMPLES=1000 times (about 80 minutes). QUICK=1, SEED=n, KILLS=100,
#                   ONLY='two ranks,orphans' and JOBS=2 as above, and the same command continues after Ctrl-C;
#                   results in bench/results/memory-campaign.json
#   make test-torch   the core of the suite under another torch: TORCH=2.14.1 (minutes, and a download of some GiB)
#   make dist    build sdist and wheel into dist/, and try the wheel in environments of its own (minutes)
#   make clean   remove the environments, caches and runs
#
# PYTHON=/path/to/python3 chooses another interpreter for the environment.

SHELL := /bin/bash
.DEFAULT_GOAL := help
# The suite starts hundreds of processes: each would compile all of Holdfast anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test test-long check bench bench-interop bench-scale bench-stores bench-compression bench-differential bench-activations bench-tiers bench-memory bench-data bench-compare page integrations interop fuzz campaign campaign-stores campaign-tiers campaign-memory test-torch dist clean

PINNED_TORCH := torch==2.13.0
TORCH ?=
TORCH_VENV := .venv-torch
VENV := .venv
DIST_VENVS := .venv-dist
STORES_VENV := .venv-stores
COMPRESSION_VENV := .venv-compression
DATA_VENV := .venv-data
INTEGRATIONS_VENVS := .venv-integrations
INTEROP_VENV := .venv-interop
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?=
ROUNDS ?= 100
FAULTS ?= 1000
QUICK ?=
ONLY ?=
BEFORE ?=
FRAMEWORK ?= all
LOCK ?=
AFTER ?= .

# Candidates are run, not only found: a version manager's shim may lie on the path and lead nowhere.
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14 python
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in $(CANDIDATES); do if "$$p" -c '$(USABLE)' >/dev/null 2>&1; then echo "$$p"; break; fi; done)

# A torch of the supported range that the interpreter already has is used rather than fetched a second time.
HAS_TORCH := import sys, importlib.metadata as m; version = tuple(map(int, m.version("torch").split(".")[:2])); \
    sys.exit(not (2, 10) <= version < (2, 16))

help:
	@sed -n 's/^\#   \(make\)/  \1/p' Makefile

$(READY): pyproject.toml
	@if test -z "$(PYTHON)"; then \
	    echo "holdfast: found no Python 3.11 or newer with venv; say which with PYTHON=/path/to/python3" >&2; exit 1; fi
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    echo "holdfast: environment in $(VENV) with $$($(PYTHON) --version 2>&1)"; \
	    if $(PYTHON) -c '$(HAS_TORCH)' >/dev/null 2>&1; then site=--system-site-packages; else site=; fi; \
	    $(PYTHON) -m venv --clear $$site $(VENV); fi
	@if ! $(PY) -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then \
	    echo "holdfast: installing $(PINNED_TORCH) (once; this is the large one)"; \
	    $(PY) -m pip install --quiet --disable-pip-version-check $(PINNED_TORCH); fi
	@echo "holdfast: installing holdfast with its tools"
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev,cli]'
	@touch $@

demo: $(READY)
	@$(PY) -m demo

SUITE := -m pytest -q -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: $(READY)
	@$(PY) $(SUITE) -m 'not long'

# Properties of which `make test` tries few examples are tried with four times as many.
test-long: $(READY)
	@$(PY) $(SUITE) -m long
	@PROPERTY_TIMES=4 $(PY) $(SUITE) tests/property/test_any_mesh_to_any_mesh.py tests/property/test_unchanged.py \
	    tests/property/test_placement_as_torch.py tests/property/test_renamed_and_resized.py \
	    tests/property/test_compressed.py tests/property/test_life_of_a_run.py

check: $(READY)
	@$(VENV)/bin/ruff check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache

# The rivals and what draws the plots are installed for this target alone.
bench: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,bench]'
	@QUICK=$(QUICK) ONLY=$(ONLY) $(PY) -m bench

bench-interop: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,bench,interop]'
	@test "$(ONLY)" = layouts || $(PY) -m bench.interop
	@QUICK=$(QUICK) $(PY) -m bench.layouts

# The server begins after the parts at the disk, which would share the cores with it.
bench-tiers: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,bench]'
	@test "$(ONLY)" = store || QUICK=$(QUICK) $(PY) -m bench.tiers
	@test "$(ONLY)" = disk || QUICK=$(QUICK) $(PY) -m tests.servers.beside \
	    $(PY) -m bench.tiers '{url}' --server '{server}'

page: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,dev,bench]' 'playwright>=1.50,<2'
	@[ -n "$$HOLDFAST_CHROMIUM" ] || command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q --no-install-recommends chromium) >/dev/null
	@PAGE_PICTURES=$(CURDIR)/docs/plots $(PY) -m pytest -q -n 0 -m '' --basetemp /tmp/holdfast-page tests/page/test_browser.py
	@QUICK=$(QUICK) $(PY) -m bench.page

bench-memory: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,bench]'
	@test -n "$(ONLY)" || QUICK=$(QUICK) $(PY) -m bench.shelf
	@QUICK=$(QUICK) ONLY=$(ONLY) $(PY) -m bench.peers

bench-scale: $(READY)
	@$(PY) -m bench.scale

# The rivals get an environment above the other one: s3fs wants another botocore than the server of the tests.
PURELIB := import sysconfig; path = sysconfig.get_path("purelib")
bench-stores: $(READY)
	@test -x $(STORES_VENV)/bin/python || $(PY) -m venv --system-site-packages $(STORES_VENV)
	@$(PY) -c '$(PURELIB); print(f"import site; site.addsitedir({path!r})")' \
	    > "$$($(STORES_VENV)/bin/python -c '$(PURELIB); print(path)')/below.pth"
	@$(STORES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cli,bench-stores]'
	@QUICK=$(QUICK) ONLY=$(ONLY) $(PY) -m tests.servers.beside \
	    $(STORES_VENV)/bin/python -m bench.stores '{url}' --server '{server}'

# The rivals get an environment above the other one: zipnn brings another setuptools.
bench-compression: $(READY)
	@test -x $(COMPRESSION_VENV)/bin/python || $(PY) -m venv --system-site-packages $(COMPRESSION_VENV)
	@$(PY) -c '$(PURELIB); print(f"import site; site.addsitedir({path!r})")' \
	    > "$$($(COMPRESSION_VENV)/bin/python -c '$(PURELIB); print(path)')/below.pth"
	@$(COMPRESSION_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cli,bench-compression]'
	@QUICK=$(QUICK) ONLY=$(ONLY) $(COMPRESSION_VENV)/bin/python -m bench.compression

bench-differential: $(READY)
	@QUICK=$(QUICK) ONLY=$(ONLY) $(PY) -m bench.differential

bench-activations: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,activations]'
	@QUICK=$(QUICK) ONLY=$(ONLY) $(PY) -m bench.activations

# The rivals get an environment above the other one: litdata brings a torchvision, which must fit the torch that is there.
bench-data: $(READY)
	@test -x $(DATA_VENV)/bin/python || $(PY) -m venv --system-site-packages $(DATA_VENV)
	@$(PY) -c '$(PURELIB); print(f"import site; site.addsitedir({path!r})")' \
	    > "$$($(DATA_VENV)/bin/python -c '$(PURELIB); print(path)')/below.pth"
	@torch=$$($(PY) -c 'import importlib.metadata as m; print(m.version("torch").partition("+")[0])'); \
	    $(DATA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$$torch" -e '.[cli,bench-data]' || \
	    echo "holdfast: the rivals could not be installed; those that are missing are not shown" >&2
	@QUICK=$(QUICK) ONLY=$(ONLY) $(DATA_VENV)/bin/python -m bench.data

# ROUNDS has another default for `campaign`.
bench-compare: $(READY)
	@test -n "$(BEFORE)" || { echo "holdfast: which checkout to compare with? BEFORE=path/to/checkout" >&2; exit 2; }
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,interop]'
	@$(PY) -m bench.compare "$(BEFORE)" "$(AFTER)" --only "$(ONLY)" $(if $(QUICK),--quick) \
	    --rounds $(if $(filter file,$(origin ROUNDS)),7,$(ROUNDS)) --markdown runs/compare/table.md

# An environment of its own for each framework, above the suite's: torch is installed once. A lock names every version.
FRAMEWORKS := accelerate dcp lightning torchtitan transformers
EXTRA_dcp := torch
ALSO_accelerate := 'torchdata>=0.11,<0.12'
ALSO_transformers := 'peft>=0.20,<0.22'
integrations: $(READY)
	@for framework in $(if $(filter all,$(FRAMEWORK)),$(FRAMEWORKS),$(FRAMEWORK)); do \
	    $(MAKE) --no-print-directory integration-of-$$framework || exit 1; done

integration-of-%: $(READY)
	@test -d tests/integrations/$* || { echo "holdfast: no integration $*; expected one of $(FRAMEWORKS), or all" >&2; exit 2; }
	@test -x $(INTEGRATIONS_VENVS)/$*/bin/python || { \
	    $(PY) -m venv --system-site-packages $(INTEGRATIONS_VENVS)/$* && \
	    $(PY) -c '$(PURELIB); print(f"import site; site.addsitedir({path!r})")' \
	        > "$$($(INTEGRATIONS_VENVS)/$*/bin/python -c '$(PURELIB); print(path)')/below.pth"; }
	@echo "holdfast: installing $*"
	@$(INTEGRATIONS_VENVS)/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(if $(LOCK),,-c tests/integrations/locks/$*.txt) $(ALSO_$*) -e '.[cli,$(or $(EXTRA_$*),$*)]'
	@$(if $(LOCK),$(INTEGRATIONS_VENVS)/$*/bin/python -m tests.integrations.lock > tests/integrations/locks/$*.txt)
	@$(INTEGRATIONS_VENVS)/$*/bin/python -m tests.integrations $* --only '$(ONLY)' $(if $(QUICK),--quick)

# The models get an environment above the other one: no other test is to meet Transformers or Megatron.
interop: $(READY)
	@test -x $(INTEROP_VENV)/bin/python || $(PY) -m venv --system-site-packages $(INTEROP_VENV)
	@$(PY) -c '$(PURELIB); print(f"import site; site.addsitedir({path!r})")' \
	    > "$$($(INTEROP_VENV)/bin/python -c '$(PURELIB); print(path)')/below.pth"
	@$(INTEROP_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[cli,interop-models]'
	@$(INTEROP_VENV)/bin/python -m pytest -q tests/interop/layouts

# atheris is installed for this target alone: it is large, and no test needs it.
fuzz: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[cli,fuzz]'
	@FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) -m fuzz $(FUZZ_TARGETS)

# libfaketime is built where it is installed, so it is installed for this target alone.
campaign: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[campaign]'
	@$(PY) -m tests.campaign.local_parts --only '$(ONLY)' --rounds $(ROUNDS) --faults $(FAULTS)

# What is not given on the command line or in the environment has the defaults of tests/campaign/record.py.
campaign-stores: $(READY)
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[campaign-stores]'
	@$(PY) -m tests.campaign

campaign-tiers: $(READY)
	@CAMPAIGN=tiers $(PY) -m tests.campaign

campaign-memory: $(READY)
	@CAMPAIGN=memory $(PY) -m tests.campaign

# One environment at a time, and none afterwards: a torch takes some GiB. It is removed after a failure too.
CORE := tests/unit tests/contract tests/property tests/distributed/matrix/test_matrix.py tests/distributed/layouts/test_coordinates.py
test-torch:
	@if test -z "$(TORCH)"; then echo "holdfast: say which torch: make test-torch TORCH=2.14.1" >&2; exit 2; fi
	@if test -z "$(PYTHON)"; then \
	    echo "holdfast: found no Python 3.11 or newer with venv; say which with PYTHON=/path/to/python3" >&2; exit 1; fi
	@trap 'rm -rf $(TORCH_VENV)' EXIT; set -e; \
	    echo "holdfast: installing torch $(TORCH)"; \
	    $(PYTHON) -m venv --clear $(TORCH_VENV); \
	    $(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==$(TORCH)' -e '.[dev,cli]'; \
	    $(TORCH_VENV)/bin/python $(SUITE) $(CORE)

# Three environments: the tools that build and check; the wheel with torch; the wheel and what it requires, no torch.
# The last two are made anew: what an earlier wheel brought along would hide what this one lacks. The wheel is built
# from the sdist, so the sdist is complete.
DIST_PIP := -m pip install --quiet --disable-pip-version-check
dist:
	@if test -z "$(PYTHON)"; then \
	    echo "holdfast: found no Python 3.11 or newer with venv; say which with PYTHON=/path/to/python3" >&2; exit 1; fi
	@rm -rf build dist src/*.egg-info $(DIST_VENVS)/torch $(DIST_VENVS)/plain $(DIST_VENVS)/work
	@test -x $(DIST_VENVS)/tools/bin/twine || { $(PYTHON) -m venv --clear $(DIST_VENVS)/tools && \
	    $(DIST_VENVS)/tools/bin/python $(DIST_PIP) 'build>=1.2,<2' 'twine>=6,<7'; }
	@echo "holdfast: building sdist and wheel"
	@$(DIST_VENVS)/tools/bin/python -m build --outdir dist . > $(DIST_VENVS)/build.log 2>&1 || { cat $(DIST_VENVS)/build.log; exit 1; }
	@$(DIST_VENVS)/tools/bin/twine check --strict dist/*
	@echo "holdfast: trying the wheel with torch"
	@if $(PYTHON) -c '$(HAS_TORCH)' >/dev/null 2>&1; then site=--system-site-packages torch=; else site= torch=$(PINNED_TORCH); fi; \
	    $(PYTHON) -m venv --clear $$site $(DIST_VENVS)/torch; \
	    $(DIST_VENVS)/torch/bin/python $(DIST_PIP) $$torch "$$(echo dist/*.whl)[cli,torch]"
	@mkdir $(DIST_VENVS)/work && cd $(DIST_VENVS)/work && \
	    ../torch/bin/python -P $(CURDIR)/release/try_wheel.py $(CURDIR)/dist/*.whl
	@echo "holdfast: trying the wheel without torch"
	@$(PYTHON) -m venv --clear $(DIST_VENVS)/plain
	@$(DIST_VENVS)/plain/bin/python $(DIST_PIP) "$$(echo dist/*.whl)[cli]"
	@$(DIST_VENVS)/plain/bin/python -m pip check
	@cd $(DIST_VENVS)/work && \
	    ../plain/bin/python -P $(CURDIR)/release/try_wheel.py $(CURDIR)/dist/*.whl --read checkpoints/run-7
	@rm -rf $(DIST_VENVS)/torch $(DIST_VENVS)/plain $(DIST_VENVS)/work
	@echo "holdfast: ready for an index:" dist/*

clean:
	rm -rf $(VENV) $(DIST_VENVS) $(STORES_VENV) $(COMPRESSION_VENV) $(DATA_VENV) $(INTEGRATIONS_VENVS) $(INTEROP_VENV) $(TORCH_VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache runs
	find src tests demo bench fuzz release -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
